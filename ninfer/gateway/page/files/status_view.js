// The status view: figures of one answer of the feed, and rates between answers.

import { byId, make, setText } from "./dom.js";
import { bytes, count, percent, rate } from "./figures.js";
import { sparkline } from "./sparkline.js";

const STATES = {
  ok: "Ready",
  loading: "Loading the model",
  draining: "Shutting down",
  unavailable: "The engine has stopped",
};
const METERS = [
  ["lanes", "Lanes", "requests that run"],
  ["queue", "Queue", "requests that wait"],
  ["pages", "KV pages", "in use, the cache's too"],
];
const TIER_HEADS = ["Tier", "Checkpoints", "Tokens", "Bytes", "Hits"];
const ERROR_HEADS = ["Time", "Path", "Code", "Field", "Request"];

export class StatusView {
  constructor(root, keys) {
    this.keys = keys;
    this.isVisible = false;
    this.isDeclined = false;
    this.state = make("p", { id: "status-state" });
    const meters = METERS.map(([name, ...texts]) => [name, meter(name, ...texts)]);
    this.meters = Object.fromEntries(meters);
    this.chart = sparkline();
    this.generated = figure("generated", "Tokens written", this.chart.element);
    this.read = figure("read", "Prompt tokens computed");
    this.reused = figure("reused", "Prompt tokens from the cache");
    this.tiers = table("tiers", "Context cache", TIER_HEADS);
    this.misses = make("p", { class: "help", id: "misses" });
    this.errors = table("errors", "Last errors", ERROR_HEADS);
    root.append(this.state,
      make("div", { class: "cards" },
        ...Object.values(this.meters).map((item) => item.element),
        this.generated.element, this.read.element, this.reused.element),
      this.tiers.element, this.misses, this.errors.element);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.isDeclined = false;
  }

  show({ status, error, rates }) {
    if (error?.status === 401 && this.isVisible && !this.isDeclined) {
      this.keys.ask().then((isGiven) => {
        this.isDeclined = !isGiven;
      });
    }
    setText(this.state, stateText(status, error));
    byId("status-root").classList.toggle("stale", error !== null);
    if (status === null || error !== null) {
      return;
    }
    this.#showEngine(status.engine);
    this.#showRates(rates);
    this.#showCache(status.cache, status.engine);
    this.#showErrors(status.errors);
  }

  #showEngine(engine) {
    const { lanes, queue, pages } = this.meters;
    lanes.set(engine?.running, engine?.max_concurrency);
    queue.set(engine?.waiting, engine?.max_pending);
    pages.set(engine?.pages_used, engine?.pages_total);
  }

  #showRates(rates) {
    const last = rates.at(-1);
    this.generated.set(last ? rate(last.generated) : "–");
    this.read.set(last ? rate(last.read) : "–");
    this.chart.show(rates.map((sample) => sample.generated));
  }

  #showCache(cache, engine) {
    this.tiers.element.hidden = cache === null;
    this.misses.hidden = cache === null;
    if (cache === null) {
      this.reused.set("–");
      return;
    }
    const reused = cache.cached_tokens_total;
    const share = percent(reused, reused + engine.prompt_tokens_total);
    this.reused.set(share, `${count(reused)} tokens`);
    this.tiers.set(Object.entries(cache.tiers).map(([name, tier]) =>
      [name, count(tier.checkpoints), count(tier.tokens), bytes(tier.bytes), count(tier.hits)]));
    const misses = Object.entries(cache.misses).filter(([, number]) => number > 0);
    const texts = misses.map(([reason, number]) => `${reason} ${count(number)}`);
    const text = texts.join(", ").replaceAll("_", " ") || "never";
    setText(this.misses, `Not all reused: ${text}`);
  }

  #showErrors({ total, last }) {
    this.errors.setCaption(`Last errors (${count(total)} since the start)`);
    this.errors.set(last.map(({ time, path, code, param, request_id: request }) =>
      [new Date(time).toLocaleTimeString(), path, code, param ?? "", request]));
  }
}

function stateText(status, error) {
  if (error !== null) {
    return error.message;
  }
  const state = STATES[status.status] ?? status.status;
  const why = status.engine?.error ? `: ${status.engine.error}` : "";
  return `${state}${why}. ${status.model.id}, context ${count(status.model.max_context)} tokens, `
    + `NInfer ${status.version}.`;
}

function meter(name, title, help) {
  const value = make("p", { class: "value" }, "–");
  const fill = make("div", { class: "fill" });
  const bar = make("div", { class: "meter", role: "meter", "aria-label": title }, fill);
  bar.setAttribute("aria-valuemin", "0");
  const element = make("section", { class: "card", id: `card-${name}` },
    make("h2", {}, title), value, bar, make("p", { class: "help" }, help));
  return {
    element,
    set(used, total) {
      const isKnown = used !== undefined && total !== undefined;
      setText(value, isKnown ? `${count(used)} of ${count(total)}` : "–");
      bar.setAttribute("aria-valuemax", String(total ?? 0));
      bar.setAttribute("aria-valuenow", String(used ?? 0));
      fill.style.width = isKnown && total > 0 ? `${Math.min(100, (100 * used) / total)}%` : "0";
    },
  };
}

function figure(name, title, ...more) {
  const value = make("p", { class: "value" }, "–");
  const note = make("p", { class: "help" });
  const element = make("section", { class: "card", id: `card-${name}` },
    make("h2", {}, title), value, ...more, note);
  return {
    element,
    set(text, help = "") {
      setText(value, text);
      setText(note, help);
    },
  };
}

function table(name, title, heads) {
  const caption = make("caption", {}, title);
  const body = make("tbody");
  const columns = heads.map((head) => make("th", { scope: "col" }, head));
  const region = { class: "table", tabindex: "0", role: "region", "aria-label": title };
  const element = make("div", { ...region, id: `table-${name}` },
    make("table", {}, caption, make("thead", {}, make("tr", {}, ...columns)), body));
  let shown = "";
  return {
    element,
    setCaption(text) {
      setText(caption, text);
    },
    set(rows) {
      const key = JSON.stringify(rows);
      if (key !== shown) {
        shown = key;
        body.replaceChildren(...rows.map(rowElement));
      }
    },
  };
}

function rowElement(cells) {
  return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
}
