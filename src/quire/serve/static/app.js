// The frame: tabs, theme, keys, whether the server is there.

import { $, call, keys } from "./api.js";
import { showModels, startChat } from "./chat.js";
import { showLive } from "./live.js";

const tabs = ["chat", "live"];

function show(name, focus) {
  for (const tab of tabs) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
    if (chosen && focus) $(`tab-${tab}`).focus();
  }
  showLive(name === "live");
  history.replaceState(null, "", `#/${name}`); // the slash keeps it from being a place to scroll to
}

for (const tab of tabs) {
  $(`tab-${tab}`).addEventListener("click", () => show(tab));
  $(`tab-${tab}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") show(tabs[1 - tabs.indexOf(tab)], true);
  });
}

const THEME = "quire-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = (name) => name && document.documentElement.setAttribute("data-theme", name);
theme(localStorage.getItem(THEME));
$("theme").addEventListener("click", () => {
  const now = document.documentElement.getAttribute("data-theme") || (dark.matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, next);
  theme(next);
  dispatchEvent(new Event("themechange"));
});

function askForKey() {
  for (const scope of ["inference", "admin"]) $(`key-${scope}`).value = keys.get(scope);
  if (!$("keys").open) $("keys").showModal();
}

$("keys-open").addEventListener("click", askForKey);
$("keys").addEventListener("close", () => {
  if ($("keys").returnValue !== "save") return;
  for (const scope of ["inference", "admin"]) keys.set(scope, $(`key-${scope}`).value.trim());
  identify();
  if (!$("live").hidden) showLive(true);
});

let model = "";
let asked = false;

async function identify() {
  try {
    const { data } = await (await call("/v1/models")).json();
    model = data[0].id;
    showModels(data.map(({ id }) => id));
    status(true, model);
  } catch (error) {
    const locked = error.status === 401 || error.status === 403;
    status(false, locked ? "a key is needed" : "not reachable");
    if (locked && !asked && !$("chat").hidden) {
      asked = true; // once: who closes the dialog knows
      askForKey();
    }
  }
}

function status(up, text) {
  $("dot").className = `dot ${up ? "up" : "down"}`;
  $("status").textContent = text;
}

async function heartbeat() {
  try {
    const response = await fetch("/ready");
    if (!response.ok) status(false, "not ready");
    else if (model) status(true, model);
    else await identify();
  } catch {
    status(false, "not reachable");
  }
  setTimeout(heartbeat, 5000);
}

startChat(askForKey);
const chosen = () => (location.hash === "#/live" ? "live" : "chat");
addEventListener("hashchange", () => show(chosen()));
show(chosen());
identify().then(heartbeat);
