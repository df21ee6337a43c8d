// One answer: thoughts folded, Markdown drawn as it streams, and what the model thought of each token.

import { $, ApiError, el } from "./api.js";
import { explain } from "./explain.js";
import { blocks, copied, draw } from "./markdown.js";

export class Answer {
  // `again` and `goOn`: what the buttons do. `before`: the content that an answer goes on from, or that was kept.
  constructor({ again, goOn, before = "", thoughts = "" }) {
    this.text = el("div", { class: "text busy", tabindex: "0", role: "group", "aria-label": "Answer; arrow keys go from token to token" });
    this.thinking = el("div", { class: "thinking" });
    this.folded = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Thoughts"), this.thinking);
    this.facts = el("p", { class: "facts" });
    this.node = el("article", { class: "turn model" }, this.folded, this.text, this.facts);
    this.again = again;
    this.goOn = goOn;
    this.content = before;
    this.thoughts = thoughts;
    this.position = before.length;
    this.tokens = []; // { from, to, entry }
    this.drawn = []; // of each block: its source and node
    this.decoder = new TextDecoder();
    this.began = performance.now();
    this.first = 0;
    this.at = -1;
    this.text.addEventListener("mouseover", (event) => this.show(Number(event.target.dataset?.i ?? -1)));
    this.text.addEventListener("mouseleave", () => this.show(-1));
    this.text.addEventListener("blur", () => this.show(-1));
    this.text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !this.tokens.length || event.target !== this.text) return;
      event.preventDefault();
      this.show(Math.min(this.tokens.length - 1, Math.max(0, this.at + step)));
    });
    this.render();
  }

  follow() {
    $("log").scrollTop = $("log").scrollHeight;
  }

  take(event) {
    if (event.error) throw new ApiError(0, event.error.message);
    this.id = event.id || this.id;
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    if (!this.first) this.first = performance.now();
    this.thoughts += choice.delta.reasoning_content || "";
    this.content += choice.delta.content || "";
    for (const entry of choice.logprobs?.content || []) this.token(entry);
    this.finish = choice.finish_reason || this.finish;
    this.drawSoon();
  }

  // Once a frame; follows what is drawn if the reader is at the end.
  drawSoon() {
    if (this.framed) return;
    this.framed = true;
    requestAnimationFrame(() => {
      this.framed = false;
      if (this.ended) return;
      const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 120;
      this.render();
      if (near) this.follow();
    });
  }

  // A token's text is a slice of the content: half a character, an end token or a thought has none of its own.
  token(entry) {
    const text = this.decoder.decode(new Uint8Array(entry.bytes || []), { stream: true });
    if (!text || !this.content.startsWith(text, this.position)) return;
    this.tokens.push({ from: this.position, to: this.position + text.length, entry });
    this.position += text.length;
  }

  // Blocks that have not changed stay as they are: all but the last.
  render() {
    this.folded.hidden = !this.thoughts;
    if (this.thinking.textContent !== this.thoughts) this.thinking.textContent = this.thoughts;
    const found = blocks(this.content);
    found.forEach((block, i) => {
      const key = `${block.kind}${block.from}:${this.content.slice(block.from, block.to)}`;
      if (this.drawn[i]?.key === key) return;
      const node = draw(block, this.content, (from, to) => this.leaf(from, to));
      if (this.drawn[i]) this.drawn[i].node.replaceWith(node);
      else this.text.append(node);
      this.drawn[i] = { key, node };
    });
    for (const { node } of this.drawn.splice(found.length)) node.remove();
  }

  // Text of a range of the content: a span for each token in it, where tokens are known.
  leaf(from, to) {
    const out = [];
    let low = 0, high = this.tokens.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tokens[middle].to <= from) low = middle + 1;
      else high = middle;
    }
    let at = from;
    for (let i = low; i < this.tokens.length && this.tokens[i].from < to; i++) {
      const token = this.tokens[i];
      if (token.from > at) out.push(this.content.slice(at, token.from));
      const p = Math.exp(token.entry.logprob);
      const level = p < 0.05 ? "p3" : p < 0.25 ? "p2" : p < 0.6 ? "p1" : "p0";
      const start = Math.max(at, token.from);
      out.push(el("span", { class: `token ${level}`, "data-i": String(i) }, this.content.slice(start, Math.min(to, token.to))));
      at = Math.min(to, token.to);
    }
    if (at < to) out.push(this.content.slice(at, to));
    return out;
  }

  end(problem) {
    this.ended = true;
    this.text.classList.remove("busy");
    this.render();
    const count = this.usage?.completion_tokens ?? this.tokens.length;
    const seconds = (performance.now() - (this.first || this.began)) / 1000;
    const facts = [];
    if (this.first) facts.push(`first token ${Math.round(this.first - this.began)} ms`);
    if (count > 1 && this.first) facts.push(`${count} tokens`, `${(count / Math.max(seconds, 0.001)).toFixed(1)} tokens/s`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) facts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (!problem && this.finish) facts.push(this.finish === "length" ? "cut at the longest answer" : this.finish);
    this.facts.replaceChildren(...facts.map((fact) => el("span", {}, fact)));
    if (problem) this.facts.append(el("span", problem === "stopped" ? {} : { class: "error", role: "alert" }, problem));
    const button = (label, work) => {
      const node = el("button", { type: "button", class: "quiet" }, label);
      node.addEventListener("click", () => work(node));
      this.facts.append(node);
    };
    if (this.content) button("Copy", (node) => copied(node, this.content));
    button("Regenerate", this.again);
    if (this.content && (problem || this.finish === "length" || !this.first)) button("Continue", this.goOn);
    if (this.id) this.facts.append(explain(this.id, this.node));
  }

  show(index) {
    for (const node of this.text.querySelectorAll(".token.at")) node.classList.remove("at");
    this.at = index;
    const token = this.tokens[index];
    $("tip").hidden = !token;
    if (!token) return;
    const nodes = this.text.querySelectorAll(`[data-i="${index}"]`);
    for (const node of nodes) node.classList.add("at");
    const { entry } = token;
    const rows = [...entry.top_logprobs];
    if (!rows.some((row) => row.token === entry.token)) rows.push(entry);
    const table = el("table", {}, ...rows.map((row) => {
      const p = Math.exp(row.logprob);
      return el("tr", { class: row.token === entry.token ? "drawn" : "" },
        el("td", {}, JSON.stringify(row.token).slice(1, -1)),
        el("td", {}, el("progress", { max: 1, value: p })),
        el("td", { class: "num" }, `${(p * 100).toFixed(p < 0.01 ? 2 : 1)}%`));
    }));
    $("tip").replaceChildren(table);
    const box = (nodes[0] || this.text).getBoundingClientRect();
    const tip = $("tip").getBoundingClientRect();
    const top = box.bottom + 8 + tip.height < innerHeight ? box.bottom + 8 : box.top - tip.height - 8;
    $("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.width - 8))}px`;
    $("tip").style.top = `${Math.max(8, top)}px`;
  }
}
