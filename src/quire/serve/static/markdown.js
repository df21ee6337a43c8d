// Markdown as nodes of the page, made from text that nobody vouches for: elements are created one by one, never parsed
// from markup, and links lead to http(s) only. Every piece of text is drawn by `leaf(from, to)`, a range of the source, so
// that who draws it knows which tokens it was made of.

import { el } from "./api.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^\n]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const HEADING = /^(#{1,6})\s+/;
const RULE = /^ {0,3}(-{3,}|\*{3,}|_{3,})\s*$/;
const QUOTE = /^ {0,3}> ?/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// The blocks of a text, in order: { kind, from, to }, and what each kind needs. The last may still grow.
export function blocks(text) {
  const lines = [];
  for (let at = 0; at <= text.length;) {
    const end = text.indexOf("\n", at) < 0 ? text.length : text.indexOf("\n", at);
    lines.push({ from: at, to: end, text: text.slice(at, end) });
    at = end + 1;
  }
  const found = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const begin = i;
    const fence = line.text.match(FENCE);
    if (fence) {
      i += 1;
      while (i < lines.length && !(lines[i].text.trim().startsWith(fence[1]) && !lines[i].text.trim().slice(fence[1].length).trim())) i += 1;
      const last = lines[Math.min(i, lines.length) - 1];
      const body = begin + 1 < i ? [lines[begin + 1].from, last.to] : [line.to, line.to];
      found.push({ kind: "code", from: line.from, to: (lines[i] || last).to, body, language: fence[2] });
      i += 1;
    } else if (!line.text.trim()) {
      i += 1;
    } else if (RULE.test(line.text)) {
      found.push({ kind: "rule", from: line.from, to: line.to });
      i += 1;
    } else if (HEADING.test(line.text)) {
      found.push({ kind: "heading", from: line.from, to: line.to, level: line.text.match(HEADING)[1].length });
      i += 1;
    } else if (line.text.includes("|") && SEPARATOR.test(lines[i + 1]?.text || "") && lines[i + 1].text.includes("-")) {
      while (i < lines.length && lines[i].text.includes("|")) i += 1;
      found.push({ kind: "table", from: line.from, to: lines[i - 1].to, lines: lines.slice(begin, i) });
    } else {
      const kind = ITEM.test(line.text) ? "list" : QUOTE.test(line.text) ? "quote" : "paragraph";
      const goesOn = (next) => next.text.trim() && !FENCE.test(next.text) && !HEADING.test(next.text) && !RULE.test(next.text) &&
        (kind === "list" ? ITEM.test(next.text) || /^\s{2,}/.test(next.text) : kind === "quote" ? QUOTE.test(next.text) : !ITEM.test(next.text) && !QUOTE.test(next.text));
      i += 1;
      while (i < lines.length && goesOn(lines[i])) i += 1;
      found.push({ kind, from: line.from, to: lines[i - 1].to, lines: lines.slice(begin, i) });
    }
  }
  return found;
}

export function draw(block, text, leaf) {
  const write = (from, to) => inline(text, from, to, leaf);
  switch (block.kind) {
    case "code": return code(block, text, leaf);
    case "rule": return el("hr");
    case "heading": {
      const mark = text.slice(block.from, block.to).match(HEADING)[0].length;
      return el(`h${Math.min(6, block.level + 2)}`, {}, ...write(block.from + mark, block.to));
    }
    case "list": return list(block.lines, write);
    case "quote": return el("blockquote", {}, ...block.lines.flatMap((line, i) => {
      const mark = line.text.match(QUOTE)[0].length;
      return [...(i ? ["\n"] : []), ...write(line.from + mark, line.to)];
    }));
    case "table": return table(block.lines, write);
    default: return el("p", {}, ...write(block.from, block.to));
  }
}

function code(block, text, leaf) {
  const copy = el("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.addEventListener("click", () => copied(copy, text.slice(...block.body)));
  const body = el("code", {}, ...leaf(...block.body));
  return el("figure", { class: "code" }, el("figcaption", {}, el("span", {}, block.language || "code"), copy),
    el("pre", { tabindex: "0", role: "group", "aria-label": `${block.language || ""} code`.trim() }, body));
}

export async function copied(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function list(lines, write) {
  const root = el(/\d/.test(lines[0].text.match(ITEM)[2]) ? "ol" : "ul");
  const open = [{ indent: lines[0].text.match(ITEM)[1].length, node: root }];
  for (const line of lines) {
    const match = line.text.match(ITEM);
    if (!match) {
      open.at(-1).node.lastElementChild.append("\n", ...write(line.from + line.text.search(/\S/), line.to));
      continue;
    }
    const indent = match[1].length;
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (indent > open.at(-1).indent + 1 && open.at(-1).node.lastElementChild) {
      const inner = el(/\d/.test(match[2]) ? "ol" : "ul");
      open.at(-1).node.lastElementChild.append(inner);
      open.push({ indent, node: inner });
    }
    const item = el("li", {}, ...write(line.from + match[0].length, line.to));
    if (/\d/.test(match[2]) && !open.at(-1).node.children.length) open.at(-1).node.start = parseInt(match[2], 10);
    open.at(-1).node.append(item);
  }
  return root;
}

function table(lines, write) {
  const cells = (line) => {
    const found = [];
    let at = line.text.search(/\S/);
    if (line.text[at] === "|") at += 1;
    for (; at < line.text.trimEnd().length;) {
      const bar = line.text.indexOf("|", at);
      const end = bar < 0 ? line.text.length : bar;
      const piece = line.text.slice(at, end);
      found.push([line.from + at + (piece.length - piece.trimStart().length), line.from + at + piece.trimEnd().length]);
      at = end + 1;
    }
    return found;
  };
  const row = (line, tag) => el("tr", {}, ...cells(line).map(([from, to]) => el(tag, {}, ...(to > from ? write(from, to) : []))));
  const body = el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))));
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, body);
}

const MARK = /(`+)|(\*\*|__)|([*_])|(~~)|\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/g;

// Nodes of one run of text; a mark that nothing closes is itself.
function inline(text, from, to, leaf) {
  const out = [];
  let plain = from;
  const flush = (end) => { if (end > plain) out.push(...leaf(plain, end)); };
  MARK.lastIndex = from;
  for (let match; (match = MARK.exec(text)) && match.index < to;) {
    const at = match.index, mark = match[1] || match[2] || match[3] || match[4];
    if (match[6]) {
      if (MARK.lastIndex > to) break;
      flush(at);
      const link = el("a", { href: match[6], target: "_blank", rel: "noopener noreferrer nofollow" }, ...leaf(at + 1, at + 1 + match[5].length));
      out.push(link);
      plain = MARK.lastIndex;
      continue;
    }
    const close = closing(text, at + mark.length, to, mark);
    const inWord = mark[0] === "_" && /\w/.test(text[at - 1] || "");
    if (close < 0 || inWord || (mark[0] !== "`" && /\s/.test(text[at + mark.length] || " "))) {
      MARK.lastIndex = at + mark.length;
      continue;
    }
    flush(at);
    const tag = { "`": "code", "~": "del" }[mark[0]] || (mark.length > 1 ? "strong" : "em");
    const inside = tag === "code" ? leaf(at + mark.length, close) : inline(text, at + mark.length, close, leaf);
    out.push(el(tag, {}, ...inside));
    plain = MARK.lastIndex = close + mark.length;
  }
  flush(to);
  return out;
}

function closing(text, from, to, mark) {
  for (let at = text.indexOf(mark, from); at >= 0 && at + mark.length <= to; at = text.indexOf(mark, at + 1)) {
    if (at === from) continue;
    if (mark[0] === "`") {
      if (text[at + mark.length] !== "`" && text[at - 1] !== "`") return at;
    } else if (!/\s/.test(text[at - 1]) && !(mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark)) &&
      !(mark[0] === "_" && /\w/.test(text[at + mark.length] || ""))) {
      return at;
    }
  }
  return -1;
}
