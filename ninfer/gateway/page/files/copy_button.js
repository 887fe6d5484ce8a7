// A button that copies a text, where the browser lets pages write to the clipboard.

import { make } from "./dom.js";

/** A list with the button, or empty where it could do nothing. */
export function copyButtons(text) {
  if (!navigator.clipboard) {
    return [];
  }
  const button = make("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not copied";
    }
  });
  return [button];
}
