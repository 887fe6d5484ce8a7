// Building elements. Text only ever becomes text nodes: nothing here parses markup.

/** make("p", {class: "a", onclick: f, "aria-label": "x"}, "text", child) */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (typeof value === "boolean") {
      element.toggleAttribute(name, value);
    } else {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Change a text only when it differs, so that nothing is announced or laid out again. */
export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
