// The API's pages, drawn from its OpenAPI document; nothing comes from elsewhere.

import { $, call, el, keys } from "./api.js";

let schemas = {};

const named = (schema) => schema?.$ref?.split("/").pop();

function type(schema = {}) {
  if (schema.$ref) return named(schema);
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.map(type).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${type(schema.items)}`;
  return schema.type || "any";
}

function fields(schema, seen = new Set()) {
  const name = named(schema);
  const found = name ? schemas[name] : schema;
  if (!found?.properties || seen.has(name)) return el("p", {}, type(schema));
  const required = new Set(found.required || []);
  const rows = Object.entries(found.properties).map(([field, value]) => el("tr", {},
    el("td", {}, el("code", {}, field), required.has(field) ? " *" : ""), el("td", {}, type(value)),
    el("td", {}, [value.description, value.default !== undefined && `default ${JSON.stringify(value.default)}`].filter(Boolean).join("; "))));
  const head = ["field (* needed)", "type", ""].map((title) => el("th", { scope: "col" }, title));
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": `Fields of ${name || "the body"}` },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

function operation(path, method, about) {
  const body = about.requestBody?.content?.["application/json"]?.schema;
  const answer = about.responses?.["200"]?.content?.["application/json"]?.schema;
  const example = `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}` +
    (body ? " -H 'content-type: application/json' -d @body.json" : "");
  const parts = [el("pre", { tabindex: "0" }, example)];
  if (about.description) parts.push(el("p", {}, about.description));
  if (about.parameters?.length) {
    parts.push(el("p", {}, "Parameters: ", about.parameters.map((one) => `${one.name} (${one.in})`).join(", ")));
  }
  if (body) parts.push(el("h4", {}, `Takes ${named(body) || ""}`), fields(body));
  if (answer) parts.push(el("h4", {}, `Answers ${named(answer) || ""}`), fields(answer));
  const title = el("summary", {}, el("b", { class: `method m-${method}` }, method.toUpperCase()), el("code", {}, path), ` ${about.summary || ""}`);
  return el("details", { class: "card operation", "data-text": `${method} ${path} ${about.summary || ""}`.toLowerCase() }, title, ...parts);
}

async function show() {
  let document_;
  try {
    document_ = await (await call("/openapi.json")).json();
  } catch (error) {
    const locked = error.status === 401 || error.status === 403;
    $("key-form").hidden = !locked;
    $("notice").hidden = false;
    $("notice").textContent = locked ? "The API's description needs a key." : error.message;
    return;
  }
  $("notice").hidden = $("key-form").hidden = true;
  schemas = document_.components?.schemas || {};
  $("title").textContent = `${document_.info.title} API`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags?.[0] || "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operation(path, method, about));
    }
  }
  $("operations").replaceChildren(...[...groups].map(([tag, nodes]) => el("section", {}, el("h2", {}, tag), ...nodes)));
}

$("filter").addEventListener("input", () => {
  const words = $("filter").value.toLowerCase();
  for (const node of document.querySelectorAll(".operation")) node.hidden = !node.dataset.text.includes(words);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.set("inference", $("key").value.trim());
  show();
});
show();
