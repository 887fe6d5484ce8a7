// Light or dark: as the system says, unless chosen here.

import { byId } from "./dom.js";
import { loadJson, saveJson } from "./storage.js";

const NAME = "theme";
const FORCED = new Set(["light", "dark"]);

export function startTheme() {
  const select = byId("theme");
  const stored = loadJson(NAME);
  select.value = FORCED.has(stored) ? stored : "system";
  apply(select.value);
  select.addEventListener("change", () => {
    apply(select.value);
    saveJson(NAME, select.value === "system" ? null : select.value);
  });
}

function apply(theme) {
  if (FORCED.has(theme)) {
    document.documentElement.dataset.theme = theme;
  } else {
    delete document.documentElement.dataset.theme;
  }
}
