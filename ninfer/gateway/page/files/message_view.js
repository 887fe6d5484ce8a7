// How one message is shown.

import { make, setText } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };

/** The element of a message; `update()` shows what has been added to it since. */
export class MessageView {
  constructor(message) {
    this.message = message;
    this.body = make("div", { class: "body" });
    const kind = { class: `message ${message.role}`, "aria-label": this.#label() };
    this.element = make("article", kind, this.body);
    this.update();
  }

  update() {
    if (this.message.role === "assistant") {
      this.#updateAnswer();
    } else {
      setText(this.body, this.message.text);
    }
  }

  /** Buttons below the message; they are replaced as a whole. */
  setActions(...buttons) {
    this.actions?.remove();
    this.actions = null;
    if (buttons.length > 0) {
      this.actions = make("div", { class: "actions" }, ...buttons);
      this.element.append(this.actions);
    }
  }

  #label() {
    const { role, name } = this.message;
    return role === "tool" ? `${NAMES.tool} of ${name}` : NAMES[role];
  }

  #updateAnswer() {
    const { message } = this;
    if (message.thought) {
      this.#updateThought();
    }
    this.text ??= this.#addPart(make("div", { class: "markdown" }));
    renderMarkdown(this.text, message.text);
    this.#updateCalls();
    const isSilent = message.state === "streaming" && !message.text && !message.thought;
    this.element.classList.toggle("waiting", isSilent);
    this.element.classList.toggle("streaming", message.state === "streaming");
    if (message.state !== "streaming") {
      this.#updateFoot();
    }
  }

  #updateThought() {
    const { message } = this;
    if (!this.thought) {
      this.summary = make("summary");
      this.thought = make("div", { class: "markdown" });
      this.body.prepend(make("details", { class: "thought" }, this.summary, this.thought));
    }
    const isThinking = message.state === "streaming" && !message.text && !message.calls.length;
    const seconds = ((message.thoughtMs ?? 0) / 1000).toFixed(1);
    setText(this.summary, isThinking ? "Thinking" : `Thought for ${seconds} s`);
    renderMarkdown(this.thought, message.thought);
  }

  #updateCalls() {
    this.calls ??= [];
    for (const [index, call] of this.message.calls.entries()) {
      if (!call) {
        continue;
      }
      this.calls[index] ??= this.#addPart(callElement());
      const element = this.calls[index];
      setText(element.querySelector(".call-name"), call.name);
      setText(element.querySelector("code"), prettyJson(call.arguments));
    }
  }

  #updateFoot() {
    const parts = [this.message.note, ...figures(this.message)].filter(Boolean);
    this.foot ??= this.#addPart(make("p", { class: "foot" }));
    this.foot.classList.toggle("error", this.message.state === "failed");
    setText(this.foot, parts.join(" · "));
    this.foot.hidden = parts.length === 0;
  }

  /** Parts stand in the order they came, the foot always last. */
  #addPart(element) {
    if (this.foot) {
      this.foot.before(element);
    } else {
      this.body.append(element);
    }
    return element;
  }
}

function callElement() {
  return make("div", { class: "call" },
    make("p", {}, "Calls ", make("strong", { class: "call-name" })),
    make("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" }, make("code")));
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function figures({ usage, rate }) {
  if (!usage) {
    return [];
  }
  const cached = usage.cached > 0 ? ` (${usage.cached} from the cache)` : "";
  const speed = rate === null ? null : `${rate.toFixed(1)} tokens/s`;
  return [`${usage.prompt} tokens read${cached}, ${usage.completion} written`, speed];
}
