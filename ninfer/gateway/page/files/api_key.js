// Asks for the API key of a server that wants one.

import { byId } from "./dom.js";
import { loadApiKey, saveApiKey } from "./storage.js";

const NEEDED = "This server asks for an API key.";
const REFUSED = "The server did not take this key.";

export class ApiKeys {
  constructor() {
    this.dialog = byId("key-dialog");
    this.input = byId("key-input");
    byId("key-cancel").addEventListener("click", () => this.dialog.close(""));
    byId("key-form").addEventListener("submit", () => {
      saveApiKey(this.input.value.trim());
      this.isGiven = true;
    });
    this.dialog.addEventListener("close", () => {
      this.input.value = "";
      this.resolve?.(this.isGiven);
      this.resolve = null;
      this.pending = null;
    });
  }

  /** True once a key was given, false when the dialog was left. One dialog for all who ask. */
  ask() {
    this.pending ??= new Promise((resolve) => {
      this.isGiven = false;
      this.resolve = resolve;
      byId("key-text").textContent = loadApiKey() ? REFUSED : NEEDED;
      this.dialog.showModal();
    });
    return this.pending;
  }
}
