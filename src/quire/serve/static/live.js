// The live view: one picture of the engine after another, drawn.

import { $, call, el, events } from "./api.js";
import { bars, cells, colour, hue, lines } from "./charts.js";
import { fillPast, openRequest, showEnded, startRequests } from "./requests.js";

const SPAN = 120; // pictures kept
const SHOWN = 18; // requests shown in a lane
const past = { ttft50: [], ttft99: [], itl50: [], itl99: [], good: [], ended: [], refused: [] };
let viewed = ""; // the model that is shown, of several; empty: the default
let watching = null;
let latest = null;
let before = null;
let due = false; // a drawing is on its way
const drawn = new Map(); // what each part was last drawn from

startRequests();

export function showLive(on) {
  watching?.abort();
  watching = null;
  if (on) watch();
}

for (const id of ["slo-ttft", "slo-tpot"]) $(id).addEventListener("input", () => latest && draw());
for (const button of document.querySelectorAll("#slo button")) {
  button.addEventListener("click", () => {
    $("slo-ttft").value = button.dataset.ttft;
    $("slo-tpot").value = "";
    if (latest) draw();
  });
}
for (const name of ["resize", "themechange", "visibilitychange"]) {
  (name === "visibilitychange" ? document : window).addEventListener(name, () => {
    drawn.clear();
    if (latest) draw();
  });
}

// Pictures may come faster than a busy machine can draw them: then only the latest is drawn, and none nobody sees.
function drawSoon() {
  if (due || document.hidden) return;
  due = true;
  setTimeout(() => { due = false; draw(); }, 0);
}

// Do `work` unless it was last done with the same `facts`.
function changed(name, facts, work) {
  const key = JSON.stringify(facts);
  if (drawn.get(name) === key) return;
  drawn.set(name, key);
  work();
}

async function watch() {
  const mine = (watching = new AbortController());
  let wait = 500;
  while (watching === mine) {
    try {
      const which = viewed && `&model=${encodeURIComponent(viewed)}`;
      const response = await call(`/view?stream=true${which}`, { scope: "admin", signal: mine.signal });
      notice("");
      wait = 500;
      for await (const picture of events(response)) {
        // What the server remembers from before anybody looked.
        if (!latest) await fillPast(past, SPAN, 0.5, slo(), picture.model);
        if (watching !== mine) return;
        take(picture);
      }
    } catch (error) {
      if (watching !== mine) return;
      const locked = error.status === 401 || error.status === 403;
      notice(locked ? "The live view needs the admin key: press Keys and enter it." : `No picture of the engine: ${error.message}`);
      if (locked) return;
    }
    await new Promise((resolve) => setTimeout(resolve, (wait = Math.min(8000, wait * 2))));
  }
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

function quantile(values, q) {
  if (!values.length) return null;
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

function slo() {
  const read = (id) => (Number($(id).value) > 0 ? Number($(id).value) / 1000 : null);
  return { ttft: read("slo-ttft"), tpot: read("slo-tpot") };
}

function push(name, value) {
  past[name].push(value);
  if (past[name].length > SPAN) past[name].shift();
}

function take(picture) {
  before = latest;
  latest = picture;
  const now = performance.now();
  picture.at = now;
  const seconds = before ? Math.max(0.1, (now - before.at) / 1000) : 0.5;
  const { firsts, ended, gaps, finished, tokens } = picture.since_last;
  const refused = before ? picture.refused - before.refused : 0;
  const { ttft, tpot } = slo();
  const met = ended.filter(([a, b]) => (ttft === null || a <= ttft) && (tpot === null || b === null || b <= tpot));
  const share = ended.length ? met.length / ended.length : 0;
  const ms = (value) => (value === null ? null : value * 1000);
  push("ttft50", ms(quantile(firsts, 0.5)));
  push("ttft99", ms(quantile(firsts, 0.99)));
  push("itl50", ms(quantile(gaps, 0.5)));
  push("itl99", ms(quantile(gaps, 0.99)));
  push("good", (share * finished) / seconds);
  push("ended", finished / seconds);
  push("refused", refused / seconds);
  picture.rate = tokens / seconds;
  if (finished || !before) showEnded();
  drawSoon();
}

function draw() {
  const { ttft, tpot } = slo();
  const blue = colour("bar"), red = colour("bar2"), grey = colour("soft");
  const options = { span: SPAN, seconds: SPAN / 2 };
  lines($("c-ttft"), [{ label: "p50", colour: blue, values: past.ttft50 }, { label: "p99", colour: red, values: past.ttft99 }],
    { ...options, limit: ttft && ttft * 1000 });
  lines($("c-itl"), [{ label: "p50", colour: blue, values: past.itl50 }, { label: "p99", colour: red, values: past.itl99 }],
    { ...options, limit: tpot && tpot * 1000 });
  lines($("c-good"), [{ label: "within", colour: blue, values: past.good }, { label: "ended", colour: grey, values: past.ended },
    { label: "refused", colour: red, values: past.refused }], options);
  changed("models", [latest.model, latest.models], () => models(latest.models, latest.model));
  const engine = latest.engine;
  if (!engine) {
    const there = latest.models.some((one) => one.name === latest.model && ["loaded", "restarting"].includes(one.state));
    notice(there ? "The engine does not answer." : `${latest.model} is not loaded.`);
    return;
  }
  if (latest.ready) notice("");
  tiles(engine);
  flow(engine);
  bars($("c-batch"), engine.steps, engine.max_batch_tokens, engine.slots);
  changed("replicas", latest.replicas, () => replicas(latest.replicas));
  pages(engine);
  changed("tree", engine.prefixes, () => tree(engine.prefixes));
}

function tiles(engine) {
  const { stats } = engine;
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "-");
  const waste = Object.values(stats.waste).reduce((a, b) => a + b, 0);
  const shown = [
    [stats.running, `running of ${engine.slots}`],
    [stats.waiting, "waiting"],
    [latest.rate.toFixed(0), "output tokens / s"],
    [percent(stats.pages_used, stats.pages_total), `of ${stats.pages_total} pages in use`],
    [percent(stats.cached_tokens, stats.prompt_tokens), "of prompt tokens from the cache"],
    [percent(waste, stats.rows), "of computed rows wasted"],
    [stats.preemptions, "preemptions"],
  ];
  $("tiles").replaceChildren(...shown.map(([value, label]) => el("div", { class: "tile" }, el("b", {}, String(value)), el("span", {}, label))));
}

// Sequences: [request, branch, status, age, prompt, computed, outputs, limit, cached, pages]
function flow(engine) {
  const lanes = { queue: [], prefill: [], decode: [] };
  for (const sequence of engine.sequences) {
    const [, , status, , prompt, computed] = sequence;
    lanes[status !== "running" ? "queue" : computed < prompt ? "prefill" : "decode"].push(sequence);
  }
  const unseen = engine.stats.running + engine.stats.waiting - engine.sequences.length;
  for (const [lane, sequences] of Object.entries(lanes)) {
    $(`n-${lane}`).textContent = sequences.length + (lane === "queue" ? Math.max(0, unseen) : 0);
    const list = $(`lane-${lane}`);
    const old = new Map([...list.children].map((node) => [node.dataset.key, node]));
    const nodes = sequences.slice(0, SHOWN).map((sequence) => chip(lane, sequence, old));
    if (sequences.length > SHOWN) nodes.push(el("li", { class: "more" }, `and ${sequences.length - SHOWN} more`));
    list.replaceChildren(...nodes);
  }
}

function chip(lane, [request, branch, status, age, prompt, computed, outputs, limit, cached], old) {
  const key = `${request}/${branch}`;
  let node = old.get(key);
  if (!node) {
    const button = el("button", { type: "button" }, el("span"), el("em"), el("progress", { max: 1, value: 0, "aria-label": "Part done" }));
    button.addEventListener("click", () => openRequest(request));
    node = el("li", { "data-key": key, class: "new" }, button);
    node.style.borderLeftColor = hue(key);
    node.addEventListener("animationend", () => node.classList.remove("new"));
  }
  const done = lane === "decode" ? outputs / Math.max(1, limit - prompt) : computed / prompt;
  const note = { queue: status === "waiting" ? `${age.toFixed(1)} s` : status, prefill: `${computed}/${prompt}`, decode: `${outputs} tok` };
  const [name, told, bar] = node.firstElementChild.children;
  name.textContent = request.replace(/^.*-/, "").slice(0, 8) + (branch ? `/${branch}` : "");
  told.textContent = note[lane];
  bar.value = Math.min(1, done);
  node.title = `${key}: ${status}, ${prompt} prompt tokens (${cached} cached), ${outputs} drawn, ${age.toFixed(1)} s old`;
  return node;
}

// Where there are several; the rest of the page shows the one that is chosen.
function models(all, shown) {
  $("models-card").hidden = all.length < 2;
  const head = ["model", "state", "requests", "GiB", "loads", "seconds", "expires"];
  $("models-note").textContent = `${all.filter((one) => one.state === "loaded").length} of ${all.length} loaded`;
  const row = (one) => {
    const choose = el("button", { type: "button", class: "quiet", "aria-pressed": String(one.name === shown) }, one.name);
    choose.addEventListener("click", () => view(one.name));
    const expires = one.pinned ? "pinned" : one.expires_at ? new Date(one.expires_at * 1000).toLocaleTimeString() : "";
    const facts = [one.state, one.requests, (one.bytes / 2 ** 30).toFixed(2), one.loads, one.load_s.toFixed(1), expires];
    return el("tr", {}, el("td", {}, choose), ...facts.map((fact) => el("td", {}, String(fact))));
  };
  $("models").replaceChildren(el("thead", {}, el("tr", {}, ...head.map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...all.map(row)));
}

function view(model) {
  viewed = model;
  latest = before = null;
  drawn.clear();
  showLive(true);
}

// Where there are several; what the rest of the page shows is of all of them together.
function replicas(all) {
  $("cluster").hidden = all.length < 2;
  const head = ["replica", "state", "role", "running", "waiting", "restarts", "host", "pid"];
  const ready = all.filter((one) => one.state === "ready").length;
  $("cluster-note").textContent = `${ready} of ${all.length} ready`;
  $("replicas").replaceChildren(el("thead", {}, el("tr", {}, ...head.map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...all.map((one) => el("tr", { class: one.state === "ready" ? "" : "error" },
      ...[one.id, one.state, one.role, one.running, one.waiting, one.restarts, one.host, one.pid].map((cell) => el("td", {}, String(cell)))))));
}

function pages(engine) {
  const counts = { blank: 0, cached: 0, shared: 0, owned: 0 };
  const names = Object.keys(counts);
  for (const tier of engine.tiers) {
    let box = document.getElementById(`tier-${tier.name}`);
    if (!box) {
      box = el("div", { class: "tier", id: `tier-${tier.name}` }, el("h3"), el("canvas", { role: "img" }));
      $("tiers").append(box);
      box.children[1].addEventListener("mousemove", (event) => point(event, box));
      box.children[1].addEventListener("mouseleave", () => { $("tip").hidden = true; });
    }
    // Pages, as the heading counts them; a cell of several pages is of the kind that most of them are.
    const shared = tier.cells.filter((cell) => cell === 2).length, owned = tier.cells.filter((cell) => cell > 2).length;
    const both = shared + owned ? Math.round((tier.used * shared) / (shared + owned)) : 0;
    counts.blank += tier.total - tier.used - tier.cached;
    counts.cached += tier.cached;
    counts.shared += both;
    counts.owned += tier.used - both;
    const each = tier.pages_per_cell > 1 ? `, ${tier.pages_per_cell} pages a cell` : "";
    box.children[0].textContent = `${tier.name}: ${tier.used} in use, ${tier.cached} cached, of ${tier.total}${each}`;
    const canvas = box.children[1];
    changed(tier.name, [tier.cells, engine.owners], () => { box.find = cells(canvas, tier.cells, engine.owners); });
    box.tier = tier;
    Object.assign(canvas.dataset, { used: tier.used, cached: tier.cached, total: tier.total });
    canvas.setAttribute("aria-label", box.children[0].textContent);
  }
  $("pages-note").textContent = `of ${engine.page_size} tokens`;
  const words = { blank: "free", cached: "free, holding a prefix", shared: "shared", owned: "one owner, a colour each" };
  $("pages-legend").replaceChildren(...names.map((name) =>
    el("span", {}, el("i", { class: `swatch s-${name}` }), `${words[name]} (${counts[name]})`)));
}

function point(event, box) {
  const bounds = event.target.getBoundingClientRect();
  const i = box.find(event.clientX - bounds.left, event.clientY - bounds.top);
  $("tip").hidden = i < 0;
  if (i < 0) return;
  const value = box.tier.cells[i];
  const what = ["free", "free, holding a prefix", "shared by several"][value] ?? `of ${latest.engine.owners[value - 3]}`;
  $("tip").textContent = `page ${i * box.tier.pages_per_cell + 1}: ${what}`;
  $("tip").style.left = `${Math.min(event.clientX + 12, innerWidth - 260)}px`;
  $("tip").style.top = `${event.clientY + 16}px`;
}

// Prefixes: [parent, pages, used, children], parents first. Right is deeper, thicker is shared by more.
function tree(nodes) {
  const leaves = nodes.map(() => 0);
  for (let i = nodes.length - 1; i >= 0; i--) {
    leaves[i] = leaves[i] || 1;
    if (nodes[i][0] >= 0) leaves[nodes[i][0]] += leaves[i];
  }
  const depth = [], top = [], filled = nodes.map(() => 0);
  let base = 0;
  nodes.forEach(([parent], i) => {
    depth[i] = parent < 0 ? 0 : depth[parent] + nodes[parent][1];
    top[i] = parent < 0 ? base : top[parent] + filled[parent];
    if (parent < 0) base += leaves[i];
    else filled[parent] += leaves[i];
  });
  const deepest = Math.max(1, ...nodes.map(([, length], i) => depth[i] + length));
  const width = $("tree").clientWidth || 900;
  const row = Math.max(1.5, Math.min(18, 300 / Math.max(1, base)));
  const height = Math.max(24, base * row + 12);
  const x = (pages) => 8 + (pages / deepest) * (width - 16);
  const y = (i) => 6 + (top[i] + leaves[i] / 2) * row;
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `${nodes.length} ${nodes.length === 1 ? "run" : "runs"} of pages, the deepest ${deepest} pages`);
  nodes.forEach(([parent, length, used, children], i) => {
    const bend = Math.min(28, ((length / deepest) * (width - 16)) / 2);
    const from = parent < 0 ? "" : `M${x(depth[i])} ${y(parent)}C${x(depth[i]) + bend} ${y(parent)} ${x(depth[i])} ${y(i)} ${x(depth[i]) + bend} ${y(i)}`;
    const run = make("path", {
      d: `${from || `M${x(0)} ${y(i)}`}H${x(depth[i] + length)}`, fill: "none", "stroke-linecap": "round",
      stroke: colour(used ? "accent" : "cached"), "stroke-opacity": used ? 0.5 + (0.5 * used) / length : 0.9,
      "stroke-width": Math.max(1, Math.min(16, row * 0.7, 16) * (leaves[i] > 1 ? 1 : 0.8), Math.min(16, 2.2 * Math.log2(1 + leaves[i]))),
    });
    const title = make("title", {});
    title.textContent = `${length} pages, ${used} in use, ${children} continuations`;
    run.append(title);
    svg.append(run);
  });
  $("tree-note").textContent = nodes.length
    ? `${nodes.length} ${nodes.length === 1 ? "run" : "runs"} of pages; right is deeper (${deepest} pages at most), thick is shared by more, strong colour is in use`
    : "nothing cached yet";
  $("tree").replaceChildren(svg);
}
