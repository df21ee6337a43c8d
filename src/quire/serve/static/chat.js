// The playground: conversations that stay in this browser, answered as they stream.

import { $, ApiError, call, el, events } from "./api.js";
import { Answer } from "./answer.js";
import * as store from "./conversations.js";

const LARGEST_FILE = 512 * 1024;
let chat = store.all()[0] || store.begin();
let abort = null;
let files = []; // { name, text } that go with the next message
let askForKey = () => {};

export function startChat(needKey) {
  askForKey = needKey;
  store.keepSettings(document.querySelectorAll("#params input, #params textarea"));
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
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  $("prompt").addEventListener("input", grow);
  $("stop").addEventListener("click", stop);
  addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("clear").addEventListener("click", () => open(store.begin()));
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => attach($("file").files));
  $("ask").addEventListener("dragover", (event) => event.preventDefault());
  $("ask").addEventListener("drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
  $("export-md").addEventListener("click", () => store.download("conversation.md", store.asMarkdown(chat), "text/markdown"));
  $("export-json").addEventListener("click", () => store.download("conversation.json", JSON.stringify(chat, null, 2), "application/json"));
  open(chat);
}

export function showModels(names) {
  const before = $("p-model").value;
  $("p-model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (names.includes(before)) $("p-model").value = before;
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${Math.min($("prompt").scrollHeight + 2, innerHeight * 0.4)}px`;
}

function stop() {
  abort?.abort();
}

async function attach(chosen) {
  for (const file of chosen) {
    const text = file.size > LARGEST_FILE ? null : await file.text();
    const problem = text === null ? `larger than ${LARGEST_FILE / 1024} KiB` : text.includes("\0") ? "not a text" : "";
    files.push(problem ? { name: file.name, problem } : { name: file.name, text });
  }
  $("file").value = "";
  showFiles();
}

function showFiles() {
  $("files").replaceChildren(...files.map((file) => {
    const drop = el("button", { type: "button", class: "quiet", "aria-label": `Leave out ${file.name}` }, "×");
    drop.addEventListener("click", () => {
      files = files.filter((other) => other !== file);
      showFiles();
    });
    return el("span", { class: file.problem ? "file error" : "file" }, file.problem ? `${file.name}: ${file.problem}` : file.name, drop);
  }));
}

// --- conversations

function open(which) {
  stop();
  chat = which;
  $("log").replaceChildren();
  if (!chat.messages.length) {
    $("log").append(el("p", { class: "empty" }, "Ask something. Hover over the answer, or focus it and use the arrow keys, " +
      "to see how sure the model was of each token and what else it considered."));
  }
  chat.messages.forEach((message, i) => $("log").append(message.role === "user" ? asked(message, i) : answered(message, i)));
  $("log").scrollTop = $("log").scrollHeight;
  listChats();
  $("prompt").focus({ preventScroll: true });
}

function listChats() {
  $("chats").replaceChildren(...store.all().map((one) => {
    const choose = el("button", { type: "button", class: "pick", ...(one === chat && { "aria-current": "true" }) }, one.title);
    choose.addEventListener("click", () => open(one));
    const remove = el("button", { type: "button", class: "quiet", "aria-label": `Delete ${one.title}` }, "×");
    remove.addEventListener("click", () => {
      store.remove(one);
      if (one === chat) open(store.begin());
      else listChats();
    });
    return el("li", {}, choose, remove);
  }));
}

function asked(message, index) {
  const edit = el("button", { type: "button", class: "quiet" }, "Edit");
  const node = el("div", { class: "asked" }, el("div", { class: "turn user" }, message.content), edit);
  edit.addEventListener("click", () => {
    const box = el("textarea", { "aria-label": "Edit message", rows: "3" });
    box.value = message.content;
    const save = el("button", { type: "button", class: "primary" }, "Send");
    const leave = el("button", { type: "button", class: "quiet" }, "Cancel");
    node.replaceChildren(box, el("div", { class: "row" }, save, leave));
    box.focus();
    leave.addEventListener("click", () => node.replaceWith(asked(message, index)));
    save.addEventListener("click", () => {
      if (!box.value.trim() || abort) return;
      chat.messages.length = index;
      chat.messages.push({ role: "user", content: box.value.trim() });
      open(chat);
      reply();
    });
  });
  return node;
}

function actions(index) {
  return {
    again: () => {
      if (abort) return;
      chat.messages.length = index;
      open(chat);
      reply();
    },
    goOn: () => {
      if (abort) return;
      const [message] = chat.messages.splice(index);
      open(chat);
      reply(message);
    },
  };
}

function answered(message, index) {
  const answer = new Answer({ ...actions(index), before: message.content, thoughts: message.thoughts || "" });
  answer.finish = message.finish;
  answer.end();
  return answer.node;
}

// --- asking

function body(continued) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const system = $("p-system").value.trim();
  const said = chat.messages.map(({ role, content }) => ({ role, content }));
  return {
    model: $("p-model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said, ...(continued ? [{ role: "assistant", content: continued.content }] : [])],
    temperature: number("p-temperature"),
    top_p: number("p-top_p"),
    max_tokens: number("p-max_tokens"),
    seed: number("p-seed"),
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: number("p-top_logprobs") || 0,
    ...(continued && { continue_final_message: true, add_generation_prompt: false }),
  };
}

function send() {
  const typed = $("prompt").value.trim();
  const attached = files.filter((file) => !file.problem);
  if ((!typed && !attached.length) || abort) return;
  const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((run) => run[0].length + 1)));
  const parts = attached.map(({ name, text }) => `${name}:\n${fence(text)}\n${text.trimEnd()}\n${fence(text)}`);
  $("prompt").value = "";
  files = [];
  showFiles();
  grow();
  $("log").querySelector(".empty")?.remove();
  if (chat.messages.at(-1)?.role === "user") chat.messages.pop(); // a question that got no answer
  chat.messages.push({ role: "user", content: [...parts, typed].filter(Boolean).join("\n\n") });
  $("log").append(asked(chat.messages.at(-1), chat.messages.length - 1));
  reply();
}

// Answer the last message; `continued` is an answer to go on from.
async function reply(continued) {
  const mine = chat; // the reader may open another meanwhile
  const answer = new Answer({ ...actions(chat.messages.length), before: continued?.content, thoughts: continued?.thoughts });
  $("log").append(answer.node);
  answer.follow();
  const control = (abort = new AbortController());
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await call("/v1/chat/completions", { body: body(continued), signal: control.signal });
    for await (const event of events(response)) {
      control.signal.throwIfAborted(); // of what came before the button was pressed, much may not be drawn yet
      answer.take(event);
    }
    answer.end();
  } catch (error) {
    answer.end(control.signal.aborted ? "stopped" : error instanceof ApiError ? error.message : "the connection was lost");
    if (error.status === 401 || error.status === 403) askForKey();
  }
  abort = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  if (answer.content) {
    const kept = { role: "assistant", content: answer.content, finish: answer.finish || "stopped" };
    mine.messages.push(answer.thoughts ? { ...kept, thoughts: answer.thoughts } : kept);
    store.save(mine);
    listChats();
  }
}
