// What outlives a reload. A browser may refuse storage altogether: then nothing is kept, and the
// page works all the same.

const PREFIX = "ninfer.";

function read(area, name) {
  try {
    return window[area].getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/** False when the browser did not keep it. */
function write(area, name, text) {
  try {
    if (text === null) {
      window[area].removeItem(PREFIX + name);
    } else {
      window[area].setItem(PREFIX + name, text);
    }
    return true;
  } catch {
    return false;
  }
}

/** A stored value of any kind; null when there is none or it is damaged. */
export function loadJson(name) {
  try {
    return JSON.parse(read("localStorage", name));
  } catch {
    return null;
  }
}

export function saveJson(name, value) {
  return write("localStorage", name, value === null ? null : JSON.stringify(value));
}

export function isOwnKey(key, name) {
  return key === PREFIX + name;
}

/** The API key lives in this tab only and goes with it. */
export function loadApiKey() {
  return read("sessionStorage", "apiKey") ?? "";
}

/** Tells the window of it by the event `ninfer-key`. */
export function saveApiKey(key) {
  write("sessionStorage", "apiKey", key || null);
  window.dispatchEvent(new Event("ninfer-key"));
}
