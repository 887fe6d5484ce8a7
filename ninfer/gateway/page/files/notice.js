// A line above the message field that says what happened, maybe with a button.

import { byId } from "./dom.js";

export class Notice {
  constructor() {
    this.element = byId("notice");
    this.text = byId("notice-text");
    this.button = byId("notice-action");
    this.button.addEventListener("click", () => {
      const action = this.action;
      this.hide();
      action?.();
    });
  }

  show(text, label = null, action = null) {
    this.text.textContent = text;
    this.action = action;
    this.button.textContent = label ?? "";
    this.button.hidden = label === null;
    this.element.hidden = false;
  }

  hide() {
    this.element.hidden = true;
  }
}
