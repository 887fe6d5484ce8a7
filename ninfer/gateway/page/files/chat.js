// The chat: the list of messages, the message field, and the request that is running.

import { ApiError, streamChat } from "./api.js";
import { applyChunk, settle } from "./answer.js";
import { copyButtons } from "./copy_button.js";
import {
  assistantMessage, Conversation, LEFT_NOTE, toolMessage, userMessage,
} from "./conversation.js";
import { byId, make } from "./dom.js";
import { MessageView } from "./message_view.js";
import { startComposer } from "./composer.js";
import { Notice } from "./notice.js";

const SAVE_EVERY_MS = 1000;
const NEAR_END_PX = 48;
const LEFT = "left";

export class Chat {
  /** `settings` has the fields of requests, `keys` asks for an API key, `feed` knows the model. */
  constructor(settings, keys, feed) {
    this.settings = settings;
    this.keys = keys;
    this.feed = feed;
    this.conversation = new Conversation();
    this.log = byId("log");
    this.notice = new Notice();
    this.announcer = byId("announcer");
    this.views = new Map();
    this.running = null;
    this.composer = startComposer((text) => this.ask(text), () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
    window.addEventListener("storage", (event) => this.#onStored(event));
    window.addEventListener("pagehide", () => this.#leave());
    this.#showAll();
  }

  get isBusy() {
    return this.running !== null;
  }

  /** Send what the user wrote. */
  ask(text) {
    this.#append(userMessage(text));
    return this.#answer();
  }

  /** Close the connection: the server ends the request at once. */
  stop() {
    this.running?.abort();
  }

  /** The same question once more, without the last answer. */
  retry() {
    if (!this.isBusy) {
      this.conversation.replace(this.conversation.messages.slice(0, -1));
      this.#showAll();
      void this.#answer();
      this.composer.focusStop();
    }
  }

  /** Start anew; what was there can be brought back. */
  clear() {
    this.stop();
    const before = this.conversation.messages;
    this.conversation.replace([]);
    this.#keep();
    this.#showAll();
    if (before.length > 0) {
      this.notice.show("The conversation was cleared.", "Undo", () => {
        this.stop();
        this.conversation.replace(before);
        this.#keep();
        this.#showAll();
      });
    }
    location.hash = "#chat";
    this.composer.focus();
  }

  /** A browser may keep a page that was left, with its connections. */
  #leave() {
    if (this.isBusy) {
      this.conversation.save();
      this.running.abort(LEFT);
    }
  }

  async #answer() {
    const fields = this.settings.requestFields();
    const messages = this.conversation.toRequest(this.settings.systemPrompt);
    this.running = new AbortController();
    const message = this.#append(assistantMessage());
    this.composer.setBusy(true);
    this.log.setAttribute("aria-busy", "true");
    this.#announce("Waiting for the answer.");
    try {
      await this.#receive(message, { messages, ...fields }, this.running.signal);
      settle(message, "done");
    } catch (error) {
      settleFailed(message, error, this.running.signal);
      if (error instanceof ApiError && error.status === 401) {
        this.#askForKey();
      }
    }
    this.#finish(message);
  }

  async #receive(message, fields, signal) {
    const body = { model: await this.feed.modelName(signal), ...fields };
    let savedAt = performance.now();
    let frame = null;
    try {
      for await (const chunk of streamChat(body, signal)) {
        applyChunk(message, chunk, performance.now());
        frame ??= requestAnimationFrame(() => {
          frame = null;
          this.#update(message);
        });
        if (performance.now() - savedAt > SAVE_EVERY_MS) {
          savedAt = performance.now();
          this.#keepIfThere(message);
        }
      }
    } finally {
      cancelAnimationFrame(frame);
    }
  }

  #finish(message) {
    this.running = null;
    this.composer.setBusy(false);
    this.log.removeAttribute("aria-busy");
    this.#update(message);
    this.#keepIfThere(message);
    this.#showActions();
    this.#announce(ANNOUNCED[message.state] ?? "");
  }

  #askForKey() {
    this.keys.ask().then((isGiven) => {
      if (isGiven && this.conversation.last?.state === "failed") {
        this.retry();
      }
    });
  }

  #append(message) {
    this.notice.hide();
    this.conversation.add(message);
    this.#show(message);
    this.#keep();
    this.#showActions();
    this.#scrollToEnd();
    return message;
  }

  #show(message) {
    const view = new MessageView(message);
    this.views.set(message, view);
    this.log.append(view.element);
  }

  #showAll() {
    this.views.clear();
    this.log.replaceChildren();
    this.conversation.messages.forEach((message) => this.#show(message));
    this.#showActions();
    this.#scrollToEnd();
  }

  #update(message) {
    const isAtEnd = this.#isAtEnd();
    this.views.get(message)?.update();
    if (isAtEnd) {
      this.#scrollToEnd();
    }
  }

  /** Below the last message: what can be done with it. */
  #showActions() {
    const last = this.conversation.last;
    for (const [message, view] of this.views) {
      if (message !== last || this.isBusy) {
        view.setActions();
      }
    }
    if (last === null || this.isBusy) {
      return;
    }
    const calls = this.conversation.openCalls();
    const buttons = calls.map((call) => this.#resultForm(call));
    if (last.role === "assistant") {
      const retry = make("button", { type: "button", class: "small" }, "Retry");
      retry.addEventListener("click", () => this.retry());
      buttons.push(retry, ...(last.text ? copyButtons(last.text) : []));
    }
    this.views.get(last)?.setActions(...buttons);
  }

  /** A tool's result is typed in; when all calls have theirs, the model goes on. */
  #resultForm(call) {
    const label = `Result of ${call.name}`;
    const names = { "aria-label": label, placeholder: label };
    const field = make("textarea", { rows: "1", required: true, ...names });
    const form = make("form", { class: "result" }, field,
      make("button", { type: "submit", class: "small" }, "Give result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#append(toolMessage(call, field.value));
      if (this.conversation.openCalls().length === 0) {
        void this.#answer();
        this.composer.focusStop();
      } else {
        this.log.querySelector(".result textarea").focus();
      }
    });
    return form;
  }

  #keep() {
    if (!this.conversation.save()) {
      this.notice.show("The browser has no room to keep this conversation.");
    }
  }

  /** An answer that was cleared away meanwhile is not kept. */
  #keepIfThere(message) {
    if (this.conversation.messages.includes(message)) {
      this.#keep();
    }
  }

  #onStored(event) {
    if (Conversation.isStoredAs(event.key) && !this.isBusy) {
      this.conversation.reload();
      this.#showAll();
    }
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  #scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  #announce(text) {
    this.announcer.textContent = text;
  }
}

const ANNOUNCED = {
  done: "The answer is complete.",
  stopped: "The answer was stopped.",
  failed: "The answer failed.",
};

function settleFailed(message, error, signal) {
  if (signal.reason === LEFT) {
    settle(message, "interrupted", LEFT_NOTE);
  } else if (signal.aborted) {
    settle(message, "stopped", "Stopped.");
  } else if (error instanceof ApiError) {
    settle(message, "failed", error.message);
  } else {
    console.error(error);
    settle(message, "failed", "The answer could not be read.");
  }
}
