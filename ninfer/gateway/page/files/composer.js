// The message field: Enter sends, Escape stops.

import { byId } from "./dom.js";

/** `onSend(text)` and `onStop()`; returns what the chat needs of the field. */
export function startComposer(onSend, onStop) {
  const form = byId("composer");
  const field = byId("prompt");
  const send = byId("send");
  const stop = byId("stop");
  let isBusy = false;

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (text !== "" && !isBusy) {
      field.value = "";
      fit(field);
      onSend(text);
    }
  });
  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    // An Enter that ends the input of a composed character is not meant for us.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", onStop);
  document.addEventListener("keydown", (event) => {
    const isOurs = !event.isComposing && !document.querySelector("dialog[open]");
    if (event.key === "Escape" && isBusy && isOurs) {
      onStop();
    }
  });

  return {
    focus: () => field.focus(),
    focusStop: () => stop.focus(),
    /** While an answer comes there is a button to stop it in place of the one that sends. */
    setBusy(busy) {
      const hadFocus = [send, stop].includes(document.activeElement);
      isBusy = busy;
      send.hidden = busy;
      stop.hidden = !busy;
      if (hadFocus) {
        (busy ? stop : field).focus();
      }
    },
  };
}

/** As high as its text, up to what the style sheet allows. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}
