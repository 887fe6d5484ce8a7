// The settings: a dialog, what is kept of it, and the fields of a request they become.

import { byId } from "./dom.js";
import { loadApiKey, loadJson, saveApiKey, saveJson } from "./storage.js";

const NAME = "settings";
const DEFAULTS = { system: "", temperature: "", topP: "", maxTokens: "", thinking: "", tools: "" };

export class Settings {
  constructor() {
    this.values = restored(loadJson(NAME));
    this.dialog = byId("settings");
    this.form = byId("settings-form");
    this.error = byId("settings-error");
    this.form.addEventListener("submit", (event) => this.#submit(event));
    byId("cancel-settings").addEventListener("click", () => this.dialog.close());
    byId("reset-settings").addEventListener("click", () => this.#show(DEFAULTS));
    byId("open-settings").addEventListener("click", () => this.open());
  }

  open() {
    this.#show(this.values);
    this.form.elements.apiKey.value = loadApiKey();
    this.dialog.showModal();
  }

  get systemPrompt() {
    return this.values.system.trim();
  }

  /** The fields of a request that are set; the others are the server's to choose. */
  requestFields() {
    const { temperature, topP, maxTokens, thinking, tools } = this.values;
    const fields = {};
    if (temperature !== "") {
      fields.temperature = Number(temperature);
    }
    if (topP !== "") {
      fields.top_p = Number(topP);
    }
    if (maxTokens !== "") {
      fields.max_completion_tokens = Number(maxTokens);
    }
    if (thinking !== "") {
      fields.enable_thinking = thinking === "on";
    }
    const list = tools === "" ? [] : parseTools(tools);
    if (list.length > 0) {
      fields.tools = list;
    }
    return fields;
  }

  #show(values) {
    for (const name of Object.keys(DEFAULTS)) {
      this.form.elements[name].value = values[name];
    }
    this.#complain(null);
  }

  /** The dialog stays open while a value cannot be used. */
  #submit(event) {
    const values = {};
    for (const name of Object.keys(DEFAULTS)) {
      values[name] = this.form.elements[name].value.trim();
    }
    try {
      parseTools(values.tools || "[]");
    } catch (error) {
      event.preventDefault();
      this.#complain(error.message);
      this.form.elements.tools.focus();
      return;
    }
    this.values = values;
    saveJson(NAME, values);
    saveApiKey(this.form.elements.apiKey.value.trim());
  }

  #complain(message) {
    this.error.hidden = message === null;
    this.error.textContent = message ?? "";
  }
}

function restored(stored) {
  const values = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (typeof stored?.[name] === "string") {
      values[name] = stored[name];
    }
  }
  try {
    parseTools(values.tools || "[]");
  } catch {
    values.tools = "";
  }
  return values;
}

function parseTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) {
    throw new Error("Tools must be a list.");
  }
  return tools;
}
