// Talking to the server: bearer keys in headers, never in URLs; event streams read through fetch.

const PREFIX = "quire-key-";

export const keys = {
  get: (scope) => sessionStorage.getItem(PREFIX + scope) || "",
  set: (scope, value) => value ? sessionStorage.setItem(PREFIX + scope, value) : sessionStorage.removeItem(PREFIX + scope),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, { scope = "inference", body, signal, method = body ? "POST" : "GET" } = {}) {
  const key = keys.get(scope) || (scope === "admin" ? "" : keys.get("admin"));
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  if (!response.ok) {
    const detail = await response.json().catch(() => null);
    throw new ApiError(response.status, detail?.error?.message || `HTTP ${response.status}`);
  }
  return response;
}

// Lets the page draw and hear its buttons. No timer: those are slow in pages that nobody looks at.
const breathe = () =>
  new Promise((next) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = next;
    port2.postMessage(0);
  });

// The JSON values of an event stream, as they come. Where they come faster than they are taken, reading never waits, and
// without a breath in between the page would stand still until the stream ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let breath = performance.now();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
        if (performance.now() - breath > 30) {
          await breathe();
          breath = performance.now();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
