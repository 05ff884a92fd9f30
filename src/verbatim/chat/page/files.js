// Files in and out: texts that the user drops or pastes, and conversations as one file.

import * as db from "./db.js";
import { keepJson, keptJson } from "./kept.js";
import { changed, openChat, path, refresh, SETTINGS, state, titleOf, toast } from "./store.js";
import { asMarkdown } from "./messages.js";

const FORMAT = "verbatim-chat-1";
const MOST_BYTES = 2e6; // size of one text; more fits into no context

// The texts of files; a file that is no text is named in a message.
export async function textsOf(list) {
  const found = [];
  for (const file of list) {
    try {
      if (file.size > MOST_BYTES) throw new Error("larger than 2 MB");
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("not text");
      found.push({ name: file.name, text });
    } catch (error) {
      toast(`${file.name} is ${error instanceof TypeError ? "not a text in UTF-8" : error.message}; only text files can be added.`);
    }
  }
  return found;
}

function download(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const today = () => new Date().toISOString().slice(0, 10);

export async function exportAll() {
  const [chats, nodes, receipts] = await Promise.all(["chats", "nodes", "receipts"].map(db.all));
  const data = { format: FORMAT, exported: new Date().toISOString(), chats, nodes, receipts, prompts: keptJson("prompts", {}), presets: keptJson("presets", {}) };
  download(JSON.stringify(data), `verbatim-chats-${today()}.json`, "application/json");
}

export async function exportMarkdown(chat) {
  await openChat(chat.id);
  const name = titleOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  download(`# ${titleOf(chat)}\n\n${asMarkdown(path())}`, `${name}.md`, "text/markdown");
}

// ---------------------------------------------------------------------------------------- import

function need(holds, what) {
  if (!holds) throw new Error(`This file holds no conversations that this page can read: ${what}.`);
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isId = (value) => typeof value === "string" && /^[\w-]{1,64}$/.test(value);
const text = (value) => (typeof value === "string" ? value : "");
const count = (value) => (Number.isFinite(value) ? value : 0);
// Of an object, the entries that are a number, a text, or true or false.
const plain = (value) => Object.fromEntries(Object.entries(isObject(value) ? value : {}).filter(([, one]) => ["number", "string", "boolean"].includes(typeof one)));
const NUMBERS = ["created", "tokens", "context", "rate", "waitMs", "thoughtMs", "seed"];
const TEXTS = ["content", "reasoning", "model", "error", "finish", "fingerprint", "callId", "name"];
const STATUS = ["done", "stopped", "interrupted", "error"];

// Entries with the fields that the page reads, each of its type; nothing else is taken over.
function chatOf(chat) {
  need(isObject(chat) && isId(chat.id), "a conversation has no id");
  const settings = { ...SETTINGS };
  for (const name of Object.keys(SETTINGS)) if (typeof chat.settings?.[name] === typeof SETTINGS[name]) settings[name] = chat.settings[name];
  return {
    id: chat.id, title: text(chat.title).slice(0, 200), named: chat.named === true, created: count(chat.created), updated: count(chat.updated),
    leaf: isId(chat.leaf) ? chat.leaf : null, model: text(chat.model), settings: { ...settings, params: plain(settings.params) },
  };
}

function nodeOf(node) {
  need(isObject(node) && isId(node.id) && isId(node.chat), "a message has no id");
  need(["user", "assistant", "tool"].includes(node.role), "a message is neither of the user nor of the model");
  const list = (value, of) => (Array.isArray(value) ? value.filter(isObject).map(of) : []);
  const out = { id: node.id, chat: node.chat, role: node.role, parent: isId(node.parent) ? node.parent : null };
  for (const name of TEXTS) if (node[name] !== undefined) out[name] = text(node[name]);
  for (const name of NUMBERS) if (node[name] !== undefined) out[name] = count(node[name]);
  out.content ??= "";
  out.created ??= 0;
  out.status = STATUS.includes(node.status) ? node.status : "interrupted";
  out.files = list(node.files, (file) => ({ name: text(file.name), text: text(file.text) }));
  if (!out.files.length) delete out.files;
  const made = list(node.calls, (call) => ({ id: text(call.id), name: text(call.name), args: text(call.args) }));
  if (made.length) out.calls = made;
  if (isObject(node.sent)) out.sent = node.sent;
  if (isObject(node.params)) out.params = Object.fromEntries(Object.entries(node.params).map(([name, one]) => [name, plain(one)]));
  if (Array.isArray(node.warnings)) out.warnings = node.warnings.map(text);
  return out;
}

export function readExport(source) {
  let data;
  try {
    data = JSON.parse(source);
  } catch {
    need(false, "it is not JSON");
  }
  need(isObject(data) && data.format === FORMAT, `its format is not ${FORMAT}`);
  need(Array.isArray(data.chats) && Array.isArray(data.nodes), "it has no list of conversations");
  const chats = data.chats.map(chatOf), known = new Set(chats.map(({ id }) => id));
  const nodes = data.nodes.map(nodeOf).filter(({ chat }) => known.has(chat));
  const ids = new Map(nodes.map((node) => [node.id, node]));
  for (const node of nodes) {
    // a parent comes before its children, so a path has an end
    const parent = ids.get(node.parent);
    if (!parent || parent.chat !== node.chat || isBelow(node, parent, ids)) node.parent = null;
  }
  const receipts = (Array.isArray(data.receipts) ? data.receipts : []).filter((one) => isObject(one) && ids.has(one.id) && isObject(one.receipt))
    .map(({ id, receipt }) => ({ id, chat: ids.get(id).chat, receipt }));
  return { chats, nodes, receipts, prompts: texts(data.prompts), presets: presetsOf(data.presets) };
}

function isBelow(node, parent, ids) {
  const seen = new Set();
  for (let up = parent; up && !seen.has(up.id); up = ids.get(up.parent)) {
    if (up === node) return true;
    seen.add(up.id);
  }
  return false;
}

const texts = (value) => Object.fromEntries(Object.entries(plain(value)).filter(([, one]) => typeof one === "string"));
const presetsOf = (value) => Object.fromEntries(Object.entries(isObject(value) ? value : {}).map(([name, one]) => [name, plain(one)]));

export async function importAll(file) {
  try {
    const { prompts, presets, ...put } = readExport(await file.text());
    await db.write({ put });
    keepJson("prompts", { ...keptJson("prompts", {}), ...prompts });
    keepJson("presets", { ...keptJson("presets", {}), ...presets });
    await refresh();
    if (state.chats.some(({ id }) => id === state.chat.id)) await openChat(state.chat.id);
    toast(`Imported ${put.chats.length} ${put.chats.length === 1 ? "conversation" : "conversations"}.`);
  } catch (error) {
    toast(error.message);
  }
  changed();
}
