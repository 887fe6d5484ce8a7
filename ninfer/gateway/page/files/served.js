// The head of the page: which model is served and whether the server is well.

import { byId, setText } from "./dom.js";

const WORDS = {
  ok: "ready", loading: "loading", draining: "shutting down", unavailable: "stopped",
};

export function showServed({ status, error }) {
  const dot = byId("health");
  const state = error === null ? status.status : "unknown";
  dot.dataset.state = state;
  const word = error === null ? (WORDS[state] ?? state) : error.message;
  dot.setAttribute("aria-label", word);
  dot.title = word;
  if (status !== null) {
    setText(byId("model-name"), status.model.id);
  } else if (error !== null) {
    setText(byId("model-name"), error.status === 401 ? "needs an API key" : "not reached");
  }
}
