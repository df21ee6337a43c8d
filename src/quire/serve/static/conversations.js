// Conversations and settings, kept in this browser only: the server stores none of them.

const CHATS = "quire-chats";
const SETTINGS = "quire-settings";
const KEPT = 200;

const read = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
};

let chats = read(CHATS, []).filter((chat) => chat && typeof chat.id === "string" && Array.isArray(chat.messages));

// Where there is no more room, the oldest go.
function keep() {
  chats.sort((a, b) => b.updated - a.updated);
  chats = chats.slice(0, KEPT);
  for (let count = chats.length; count >= 0; count = Math.floor(count * 0.7) - 1) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(chats.slice(0, count)));
      return;
    } catch {
      // too much: try with fewer
    }
  }
}

export const all = () => chats;

export function begin() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [], updated: Date.now() };
}

export function save(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  chat.title = (first?.content || "New conversation").trim().split("\n")[0].slice(0, 60);
  chat.updated = Date.now();
  if (!chats.includes(chat)) chats.push(chat);
  keep();
}

export function remove(chat) {
  chats = chats.filter((other) => other !== chat);
  keep();
}

// Fields of a form, by id: what they hold now, and later again.
export function keepSettings(fields) {
  const kept = read(SETTINGS, {});
  for (const field of fields) {
    const value = field.type === "checkbox" ? "checked" : "value";
    if (typeof kept[field.id] === typeof field[value]) field[value] = kept[field.id];
    field.addEventListener("change", () => {
      kept[field.id] = field[value];
      try {
        localStorage.setItem(SETTINGS, JSON.stringify(kept));
      } catch {
        // private windows may not keep anything
      }
    });
  }
}

export function asMarkdown(chat) {
  const who = { user: "You", assistant: "Model" };
  return chat.messages.map(({ role, content }) => `## ${who[role] || role}\n\n${content}\n`).join("\n");
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
