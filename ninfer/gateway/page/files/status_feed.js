// Asks for the server's status again and again, and keeps what rates need.

import { getStatus } from "./api.js";

const PACE_MS = { fast: 1000, slow: 15000 };
const MAX_WAIT_MS = 30000;
const TIMEOUT_MS = 10000;
const MAX_SAMPLES = 60;

/** Listeners get {status, error, rates}: the last answer, the error of the last try or null, and
    samples of rates, oldest first. Nothing is asked for while the page is hidden. */
export class StatusFeed {
  constructor() {
    this.listeners = [];
    this.status = null;
    this.error = null;
    this.rates = [];
    this.pace = "slow";
    this.numFailures = 0;
    this.timer = null;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => this.#restart());
    window.addEventListener("ninfer-key", () => {
      this.numFailures = 0;
      this.#restart();
    });
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  setPace(pace) {
    this.pace = pace;
    this.#restart();
  }

  /** The name the server goes by; some take no other. Throws as requests do. */
  async modelName(signal) {
    this.status ??= await getStatus(signal);
    return this.status.model.id;
  }

  #restart() {
    clearTimeout(this.timer);
    this.timer = null;
    if (!document.hidden && !this.isAsking) {
      void this.#poll();
    }
  }

  async #poll() {
    this.isAsking = true;
    try {
      this.#take(await getStatus(AbortSignal.timeout(TIMEOUT_MS)));
    } catch (error) {
      this.error = error;
      this.numFailures += 1;
    } finally {
      this.isAsking = false;
    }
    this.listeners.forEach((listener) => listener(this));
    this.#plan();
  }

  #plan() {
    if (document.hidden) {
      return;
    }
    const pace = PACE_MS[this.pace];
    const wait = Math.min(pace * 2 ** Math.min(this.numFailures, 5), Math.max(pace, MAX_WAIT_MS));
    this.timer = setTimeout(() => this.#poll(), wait);
  }

  #take(status) {
    const rate = rateBetween(this.status, status);
    if (rate !== null) {
      this.rates = [...this.rates, rate].slice(-MAX_SAMPLES);
    }
    this.status = status;
    this.error = null;
    this.numFailures = 0;
  }
}

/** Tokens a second from one answer to the next; null when the server was started in between. */
export function rateBetween(before, after) {
  if (!before?.engine || !after.engine) {
    return null;
  }
  const seconds = after.clock_s - before.clock_s;
  const generated = after.engine.completion_tokens_total - before.engine.completion_tokens_total;
  const read = after.engine.prompt_tokens_total - before.engine.prompt_tokens_total;
  if (seconds <= 0 || generated < 0 || read < 0) {
    return null;
  }
  return { generated: generated / seconds, read: read / seconds };
}
