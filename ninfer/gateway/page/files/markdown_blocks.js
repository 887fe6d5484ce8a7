// Text -> blocks of Markdown: paragraphs, headings, code, quotes, lists, tables, rules.
//
// Each block keeps its source, so that a growing text is rendered again only where it grew. Time is
// linear in the text; what nests too deep is taken as plain text.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const HEADING_END = /(?:^|\s)#+$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/;
const DELIMITER = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const MAX_DEPTH = 6;

export function parseBlocks(text, depth = 0) {
  return parseLines(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), depth);
}

function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

/** [block, the line behind it] */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    return codeAt(lines, at, fence);
  }
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").trim().replace(HEADING_END, "").trim();
    return [{ kind: "heading", level: heading[1].length, text }, at + 1];
  }
  if (RULE.test(line)) {
    return [{ kind: "rule" }, at + 1];
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    return quoteAt(lines, at, depth);
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) {
    return listAt(lines, at, depth);
  }
  if (isTableAt(lines, at)) {
    return tableAt(lines, at);
  }
  return paragraphAt(lines, at, depth);
}

/** An unclosed fence goes to the end: the text may still be growing. */
function codeAt(lines, at, [, marks, language]) {
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end], marks)) {
    end += 1;
  }
  const text = lines.slice(at + 1, end).join("\n");
  return [{ kind: "code", language: language.trim(), text }, Math.min(end + 1, lines.length)];
}

function isClosing(line, marks) {
  const text = line.trim();
  return text.length >= marks.length && text === marks[0].repeat(text.length);
}

function quoteAt(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const match = QUOTE.exec(lines[end]);
    if (!match) {
      break;
    }
    inner.push(match[1]);
  }
  return [{ kind: "quote", blocks: parseLines(inner, depth + 1) }, end];
}

function listAt(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (let next = at; next < lines.length; next = behindBlank(lines, end)) {
    const match = ITEM.exec(lines[next]);
    const goesOn = match && match[1].length < indent.length + 2 && !RULE.test(lines[next]);
    if (!goesOn || /\d/.test(match[2]) !== isOrdered) {
      break;
    }
    const [inner, behind] = itemAt(lines, next, match);
    items.push(parseLines(inner, depth + 1));
    end = behind;
  }
  return [{ kind: "list", isOrdered, start: isOrdered ? parseInt(mark, 10) : 1, items }, end];
}

/** Items may have a blank line between them. */
function behindBlank(lines, at) {
  return lines[at]?.trim() === "" ? at + 1 : at;
}

/** The lines of one item without their indent, and the line behind them. */
function itemAt(lines, at, [, indent, mark, text]) {
  const inner = [text ?? ""];
  const width = indent.length + mark.length + 1;
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const spaces = line.length - line.trimStart().length;
    if (line.trim() === "") {
      if (!continuesBehind(lines, end, indent.length)) {
        break;
      }
      inner.push("");
    } else if (spaces > indent.length + 1) {
      inner.push(line.slice(Math.min(spaces, width)));
    } else if (ITEM.test(line) || lines[end - 1].trim() === "" || startsBlock(line)) {
      break;
    } else {
      inner.push(line.trimStart());
    }
  }
  return [inner, end];
}

/** Behind a blank line something of this list or item follows. */
function continuesBehind(lines, at, indent) {
  const next = lines[at + 1];
  if (next === undefined || next.trim() === "") {
    return false;
  }
  return next.length - next.trimStart().length > indent + 1;
}

function isTableAt(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length
    && lines[at + 1].includes("|") && DELIMITER.test(lines[at + 1].trim());
}

function tableAt(lines, at) {
  const head = cells(lines[at]);
  const aligns = cells(lines[at + 1]).map(alignment);
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) {
    rows.push(cells(lines[end]));
  }
  return [{ kind: "table", head, aligns, rows }, end];
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split("|").map((cell) => cell.trim());
}

function alignment(cell) {
  if (cell.endsWith(":")) {
    return cell.startsWith(":") ? "center" : "end";
  }
  return "start";
}

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !endsParagraph(lines, end, depth)) {
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [{ kind: "paragraph", text }, end];
}

function endsParagraph(lines, at, depth) {
  return startsBlock(lines[at]) || isTableAt(lines, at)
    || (depth < MAX_DEPTH && (QUOTE.test(lines[at]) || ITEM.test(lines[at])));
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line);
}
