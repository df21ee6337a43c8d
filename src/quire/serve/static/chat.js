// The playground: one conversation, streamed, with what the model thought of each token.

import { $, ApiError, call, el, events } from "./api.js";
import { explain } from "./explain.js";

let history = [];
let abort = null;

export function startChat(modelName) {
  for (const name of ["temperature", "top_p"]) {
    const show = () => { $(`o-${name}`).value = Number($(`p-${name}`).value).toFixed(2); };
    $(`p-${name}`).addEventListener("input", show);
    show();
  }
  const shade = () => $("log").classList.toggle("shade", $("p-shade").checked);
  $("p-shade").addEventListener("change", shade);
  shade();
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send(modelName());
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  $("stop").addEventListener("click", stop);
  addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("clear").addEventListener("click", () => {
    stop();
    history = [];
    $("log").replaceChildren();
    $("prompt").focus();
  });
}

function stop() {
  abort?.abort();
}

function body(model) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const system = $("p-system").value.trim();
  const top = number("p-top_logprobs") || 0;
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: number("p-temperature"),
    top_p: number("p-top_p"),
    max_tokens: number("p-max_tokens"),
    seed: number("p-seed"),
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: top,
  };
}

async function send(model) {
  const prompt = $("prompt").value.trim();
  if (!prompt || abort) return;
  $("prompt").value = "";
  $("log").querySelector(".empty")?.remove();
  history.push({ role: "user", content: prompt });
  $("log").append(el("div", { class: "turn user" }, prompt));
  const answer = new Answer();
  $("log").append(answer.node);
  answer.follow();
  abort = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await call("/v1/chat/completions", { body: body(model), signal: abort.signal });
    for await (const event of events(response)) {
      abort.signal.throwIfAborted(); // of what came before the button was pressed, much may not be drawn yet
      answer.take(event);
    }
    answer.end();
  } catch (error) {
    answer.end(abort.signal.aborted ? "stopped" : error instanceof ApiError ? error.message : "the connection was lost");
  }
  abort = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  if (answer.content) history.push({ role: "assistant", content: answer.content });
  else history.pop();
}

class Answer {
  constructor() {
    this.text = el("div", { class: "text busy", tabindex: "0", "aria-label": "Answer; arrow keys go from token to token" });
    this.facts = el("p", { class: "facts" });
    this.node = el("article", { class: "turn model" }, this.text, this.facts);
    this.content = "";
    this.position = 0;
    this.tokens = [];
    this.decoder = new TextDecoder();
    this.began = performance.now();
    this.first = 0;
    this.at = -1;
    this.text.addEventListener("mouseover", (event) => this.show(this.tokens.findIndex((t) => t.node === event.target)));
    this.text.addEventListener("mouseleave", () => this.show(-1));
    this.text.addEventListener("blur", () => this.show(-1));
    this.text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.show(Math.min(this.tokens.length - 1, Math.max(0, this.at + step)));
    });
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
    this.keepUp();
    this.content += choice.delta.content || "";
    for (const entry of choice.logprobs?.content || []) this.token(entry);
    this.finish = choice.finish_reason || this.finish;
  }

  // Follows what is about to be drawn if the reader is at the end. Once a frame: asking where that is lays out the page.
  keepUp() {
    if (this.framed) return;
    this.framed = true;
    const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 120;
    requestAnimationFrame(() => {
      this.framed = false;
      if (near) this.follow();
    });
  }

  // A token's text is a slice of the content: half a character, or an end token, has none of its own.
  token(entry) {
    const length = this.decoder.decode(new Uint8Array(entry.bytes || []), { stream: true }).length;
    const text = this.content.slice(this.position, this.position + length);
    this.position += text.length;
    const p = Math.exp(entry.logprob);
    const level = p < 0.05 ? "p3" : p < 0.25 ? "p2" : p < 0.6 ? "p1" : "p0";
    const node = el("span", { class: `token ${level}` }, text);
    this.tokens.push({ node, entry });
    this.text.append(node);
  }

  end(problem) {
    this.text.classList.remove("busy");
    if (this.content.length > this.position) this.text.append(this.content.slice(this.position));
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
    if (this.id) this.facts.append(explain(this.id, this.node));
  }

  show(index) {
    this.tokens[this.at]?.node.classList.remove("at");
    this.at = index;
    const token = this.tokens[index];
    $("tip").hidden = !token;
    if (!token) return;
    token.node.classList.add("at");
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
    const box = token.node.getBoundingClientRect();
    const tip = $("tip").getBoundingClientRect();
    const top = box.bottom + 8 + tip.height < innerHeight ? box.bottom + 8 : box.top - tip.height - 8;
    $("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.width - 8))}px`;
    $("tip").style.top = `${Math.max(8, top)}px`;
  }
}
