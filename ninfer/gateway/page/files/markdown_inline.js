// A line of Markdown -> text, code, strong, em, struck, links and line breaks.
//
// Delimiters are searched forwards once: a kind without a closing mark is not looked for again.

const PAIRS = [
  ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"],
];
const URL_TEXT = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const TARGET = /<?((?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})>?(?: +"[^"\n]{0,500}")?/;
const LINK = new RegExp(`\\[([^[\\]\\n]{1,1000})\\]\\(${TARGET.source}\\)`, "y");
const ESCAPE = /\\[\\`*_{}[\]()#+\-.!~|<>]/y;
const SPECIAL = /[\\`*_~[\n]|https?:\/\//g;
const MAX_DEPTH = 6;

/** A list of nodes: {kind: "text" | "code", text}, {kind: "break"}, {kind: "link", href, nodes},
    {kind: "strong" | "em" | "del", nodes} */
export function parseInline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    pushText(nodes, text.slice(at, next));
    if (next === text.length) {
      break;
    }
    const [node, end] = nodeAt(text, next, depth, missing) ?? [plain(text[next]), next + 1];
    if (node.kind === "text") {
      pushText(nodes, node.text);
    } else {
      nodes.push(node);
    }
    at = end;
  }
  return nodes;
}

function plain(text) {
  return { kind: "text", text };
}

function pushText(nodes, text) {
  const last = nodes.at(-1);
  if (text === "") {
    return;
  }
  if (last?.kind === "text") {
    last.text += text;
  } else {
    nodes.push(plain(text));
  }
}

/** [node, end] or null when the character stands for itself. */
function nodeAt(text, at, depth, missing) {
  switch (text[at]) {
    case "\n":
      return [{ kind: "break" }, at + 1];
    case "\\":
      return escapeAt(text, at);
    case "`":
      return codeAt(text, at, missing);
    case "[":
      return linkAt(text, at, depth);
    case "h":
      return urlAt(text, at);
    default:
      return pairAt(text, at, depth, missing);
  }
}

function escapeAt(text, at) {
  ESCAPE.lastIndex = at;
  return ESCAPE.test(text) ? [plain(text[at + 1]), at + 2] : null;
}

function codeAt(text, at, missing) {
  let width = 1;
  while (text[at + width] === "`") {
    width += 1;
  }
  const marks = "`".repeat(width);
  const end = closing(text, marks, at + width, missing, (found) =>
    text[found - 1] !== "`" && text[found + width] !== "`");
  if (end === null) {
    return [plain(marks), at + width];
  }
  const code = text.slice(at + width, end).replace(/\n/g, " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return [{ kind: "code", text: isPadded ? code.slice(1, -1) : code }, end + width];
}

function linkAt(text, at, depth) {
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  const href = match && safeHref(match[2]);
  if (!href || depth >= MAX_DEPTH) {
    return null;
  }
  const nodes = parseInline(match[1], MAX_DEPTH);
  return [{ kind: "link", href, nodes }, at + match[0].length];
}

function urlAt(text, at) {
  URL_TEXT.lastIndex = at;
  const match = URL_TEXT.exec(text);
  const shown = match?.[0].replace(/[.,;:!?*_~)\]]+$/, "");
  const href = shown && safeHref(shown);
  return href ? [{ kind: "link", href, nodes: [plain(shown)] }, at + shown.length] : null;
}

/** Web addresses and mail only: never a script. */
function safeHref(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function pairAt(text, at, depth, missing) {
  if (depth >= MAX_DEPTH) {
    return null;
  }
  for (const [marks, kind] of PAIRS) {
    if (text.startsWith(marks, at) && opens(text, at, marks)) {
      const start = at + marks.length;
      const isRight = (found) => closes(text, found, start, marks);
      const end = closing(text, marks, start, missing, isRight);
      if (end !== null) {
        const nodes = parseInline(text.slice(start, end), depth + 1);
        return [{ kind, nodes }, end + marks.length];
      }
    }
  }
  return null;
}

function opens(text, at, marks) {
  const after = text[at + marks.length];
  const isInWord = marks[0] === "_" && isWordPart(text[at - 1]);
  return after !== undefined && !/\s/.test(after) && !isInWord;
}

function closes(text, at, start, marks) {
  const before = text[at - 1];
  const after = text[at + marks.length];
  const isInWord = marks[0] === "_" && isWordPart(after);
  const isLonger = after === marks[0] || (marks.length === 1 && before === marks);
  return at > start && !/\s/.test(before) && !isInWord && !isLonger;
}

function isWordPart(character) {
  return character !== undefined && /[\p{L}\p{N}_]/u.test(character);
}

/** Where `marks` close, or null; then they are not looked for again in this text. */
function closing(text, marks, from, missing, isRight) {
  if (missing.has(marks)) {
    return null;
  }
  for (let at = text.indexOf(marks, from); at !== -1; at = text.indexOf(marks, at + 1)) {
    if (isRight(at)) {
      return at;
    }
  }
  missing.add(marks);
  return null;
}
