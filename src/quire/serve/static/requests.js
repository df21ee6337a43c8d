// Requests that were and are: one of them closer, an end to it, and a table of those that ended.

import { $, call, el } from "./api.js";
import { report } from "./explain.js";

const SHOWN = 50;
let open = "";

const ms = (seconds) => (seconds === null ? "" : `${(seconds * 1000).toFixed(0)} ms`);

async function requests(limit) {
  return (await (await call(`/v1/requests?limit=${limit}`, { scope: "admin" })).json()).data;
}

export function startRequests() {
  $("request-close").addEventListener("click", () => { $("request").hidden = true; });
  $("request-cancel").addEventListener("click", async () => {
    try {
      const { cancelled } = await (await call(`/v1/requests/${encodeURIComponent(open)}`, { scope: "admin", method: "DELETE" })).json();
      say(cancelled ? "It is cancelled." : "It has ended already.");
    } catch (error) {
      say(error.message);
    }
  });
}

function say(text) {
  $("request-why").replaceChildren(el("p", {}, text));
}

export async function openRequest(id) {
  open = id;
  $("request").hidden = false;
  $("request-id").textContent = id;
  try {
    const { data } = await (await call(`/v1/requests/${encodeURIComponent(id)}/explain`, { scope: "admin" })).json();
    $("request-cancel").disabled = data[0].state !== "running";
    $("request-why").replaceChildren(...report(data[0]));
  } catch (error) {
    say(error.message);
  }
  $("request").scrollIntoView({ block: "nearest" });
}

export async function showEnded() {
  const found = (await requests(4 * SHOWN).catch(() => [])).filter((request) => request.ended !== null)
    .sort((a, b) => b.ended - a.ended);
  const head = ["request", "ended", "key", "prompt", "cached", "answer", "first token", "per token", "end"];
  const rows = found.slice(0, SHOWN).map((request) => {
    const button = el("button", { type: "button", class: "quiet" }, request.id.replace(/^.*-/, "").slice(0, 8));
    button.addEventListener("click", () => openRequest(request.id));
    const cells = [new Date(request.ended * 1000).toLocaleTimeString(), request.key, request.prompt_tokens, request.cached_tokens,
      request.output_tokens, ms(request.ttft_s), ms(request.tpot_s), request.error || request.finish];
    return el("tr", {}, el("td", {}, button), ...cells.map((cell) => el("td", {}, String(cell))));
  });
  $("ended").replaceChildren(el("thead", {}, el("tr", {}, ...head.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, ...rows));
  $("ended-note").textContent = rows.length ? "the latest; press one to see where its time went" : "none yet";
}

// Charts begin with what the server remembers: a point for each `step` seconds of the last `span` steps. `slo`: what counts
// as good, in seconds; null is anything.
export async function fillPast(past, span, step, slo, model) {
  const found = (await requests(2048).catch(() => [])).filter((request) => request.model === model);
  const now = Date.now() / 1000;
  const bins = (pick, at) => {
    const out = Array.from({ length: span }, () => []);
    for (const request of found) {
      const value = pick(request), place = span - 1 - Math.floor((now - at(request)) / step);
      if (value !== null && place >= 0 && place < span) out[place].push(value);
    }
    return out;
  };
  const quantile = (values, q) => (values.length ? values.toSorted((a, b) => a - b)[Math.min(values.length - 1, Math.floor(q * values.length))] * 1000 : null);
  const fill = (name, values) => past[name].splice(0, past[name].length, ...values);
  const firsts = bins((r) => r.ttft_s, (r) => r.arrived + (r.ttft_s || 0));
  const gaps = bins((r) => r.tpot_s, (r) => r.ended || now);
  const ended = bins((r) => (r.ended && !r.error ? 1 : null), (r) => r.ended || 0);
  const within = (value, limit) => limit === null || value === null || value <= limit;
  const met = (r) => r.ended && !r.error && within(r.ttft_s, slo.ttft) && within(r.tpot_s, slo.tpot);
  const good = bins((r) => (met(r) ? 1 : null), (r) => r.ended || 0);
  fill("ttft50", firsts.map((values) => quantile(values, 0.5)));
  fill("ttft99", firsts.map((values) => quantile(values, 0.99)));
  fill("itl50", gaps.map((values) => quantile(values, 0.5)));
  fill("itl99", gaps.map((values) => quantile(values, 0.99)));
  fill("ended", ended.map((values) => values.length / step));
  fill("good", good.map((values) => values.length / step));
  fill("refused", ended.map(() => 0));
}
