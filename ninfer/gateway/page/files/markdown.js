// Markdown of a model -> elements. Built node by node: what looks like HTML is shown as text.

import { copyButtons } from "./copy_button.js";
import { make } from "./dom.js";
import { parseBlocks } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

const sources = new WeakMap();

/** Make `container` show `text`. Blocks that have not changed stay, with their selection. */
export function renderMarkdown(container, text) {
  const blocks = parseBlocks(text);
  for (const [index, block] of blocks.entries()) {
    const shown = container.children[index];
    if (shown && sources.get(shown) === block.source) {
      continue;
    }
    const element = blockElement(block);
    sources.set(element, block.source);
    if (shown) {
      shown.replaceWith(element);
    } else {
      container.append(element);
    }
  }
  while (container.children.length > blocks.length) {
    container.lastElementChild.remove();
  }
}

function blockElement(block) {
  switch (block.kind) {
    case "code":
      return codeElement(block);
    case "heading":
      return make(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return make("p", {}, ...inline(block.text));
  }
}

function codeElement({ language, text }) {
  const label = language ? `Code, ${language}` : "Code";
  const pre = make("pre", { tabindex: "0", role: "region", "aria-label": label },
    make("code", {}, text));
  const name = make("span", {}, language);
  const head = make("div", { class: "code-head" }, name, ...copyButtons(text));
  return make("div", { class: "code-block" }, head, pre);
}

function listElement({ isOrdered, start, items }) {
  const list = make(isOrdered ? "ol" : "ul");
  if (isOrdered && start !== 1) {
    list.start = start;
  }
  for (const blocks of items) {
    list.append(make("li", {}, ...itemChildren(blocks)));
  }
  return list;
}

/** An item of one line is not a paragraph of its own. */
function itemChildren(blocks) {
  return blocks.flatMap((block, index) =>
    index === 0 && block.kind === "paragraph" ? inline(block.text) : [blockElement(block)]);
}

function tableElement({ head, aligns, rows }) {
  const cell = (tag) => (text, index) =>
    make(tag, { class: `align-${aligns[index] ?? "start"}` }, ...inline(text));
  const body = rows.map((row) => make("tr", {}, ...row.slice(0, head.length).map(cell("td"))));
  return make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    make("table", {},
      make("thead", {}, make("tr", {}, ...head.map(cell("th")))),
      make("tbody", {}, ...body)));
}

function inline(text) {
  return parseInline(text).map(inlineElement);
}

function inlineElement(node) {
  switch (node.kind) {
    case "text":
      return node.text;
    case "code":
      return make("code", {}, node.text);
    case "break":
      return make("br");
    case "link":
      return make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" },
        ...node.nodes.map(inlineElement));
    default:
      return make(node.kind, {}, ...node.nodes.map(inlineElement));
  }
}
