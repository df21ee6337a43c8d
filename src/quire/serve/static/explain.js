// Where a request's time went, as a bar and a few lines.

import { call, el } from "./api.js";

const seconds = (s) => (s < 1 ? `${(s * 1000).toFixed(1)} ms` : `${s.toFixed(2)} s`);

export function explain(id, place) {
  const button = el("button", { type: "button", class: "quiet", "aria-expanded": "false" }, "Where did the time go?");
  button.addEventListener("click", async () => {
    const open = place.querySelector(".why");
    button.setAttribute("aria-expanded", String(!open));
    if (open) return open.remove();
    const box = el("div", { class: "why" });
    place.append(box);
    try {
      const found = (await (await call(`/v1/requests/${encodeURIComponent(id)}/explain`)).json()).data[0];
      box.append(...report(found));
    } catch (error) {
      box.append(el("span", { class: "error" }, error.message));
    }
    box.scrollIntoView({ block: "nearest" });
  });
  return button;
}

export function report(found) {
  const branch = found.branches[0];
  const parts = [["prepare", found.prepare_s, "parsing, rendering, tokenising"]];
  if (branch) {
    parts.push(["queue", branch.queue_s, branch.pending_s ? `${seconds(branch.pending_s)} of it for pages others computed` : "waiting to be admitted"]);
    const chunks = branch.prefill_chunks.map((c) => c.tokens).join(" + ");
    parts.push(["prefill", branch.prefill_s, chunks ? `computed ${chunks} prompt tokens` : "to the first token"]);
    parts.push(["decode", branch.decode_s, `${branch.output_tokens} tokens`]);
    if (branch.preemptions.length) {
      const lost = branch.preemptions.reduce((sum, p) => sum + p.recomputed_tokens, 0);
      parts.push(["preempted", branch.preempted_s, `${branch.preemptions.length} times, ${lost} tokens computed again`]);
    }
  }
  const total = parts.reduce((sum, [, s]) => sum + s, 0) || 1;
  const bar = el("div", { class: "span", role: "img", "aria-label": parts.map(([n, s]) => `${n} ${seconds(s)}`).join(", ") });
  for (const [name, s] of parts) {
    const piece = el("i", { class: `k-${name}`, title: `${name} ${seconds(s)}` });
    piece.style.width = `${(s / total) * 100}%`;
    bar.append(piece);
  }
  const list = el("dl");
  for (const [name, s, note] of parts) {
    list.append(el("dt", {}, el("span", { class: `swatch k-${name}` }), name), el("dd", {}, `${seconds(s)}, ${note}`));
  }
  if (found.prefix) {
    const { cached_tokens: cached, prompt_tokens: prompt, explanation } = found.prefix;
    list.append(el("dt", {}, "prefix"), el("dd", {}, `${cached} of ${prompt} tokens from the cache: ${explanation}`));
  }
  return [bar, list];
}
