// The state of the page, and the only place that holds it. Views read it and call changed().
//
// A conversation is a tree of nodes. A node is one message: {id, chat, parent, role, content, ...};
// siblings (equal `parent`) are its versions. `chat.leaf` names the end of the shown path. A node
// that is being written is in `running`, and every view shows that same object.

import * as db from "./db.js";
import { keepJson, kept, keptJson } from "./kept.js";

export const state = {
  chats: [], chat: null, nodes: new Map(), // nodes: the current conversation
  models: [], reach: "starting", // starting, ok, loading, lost
  search: "", sidebar: false, drawer: false, panel: null, askKey: false,
  editing: null, toast: null, theme: kept("theme") || "auto", dropping: false,
};
export const running = new Map(); // node id -> {node, chat, stop}
export const SETTINGS = { system: "", params: {}, schema: "", tools: "", more: "", reasoning: "" };
const SAVE_MS = 300; // between two saves of an answer that is being written
const STALE_MS = 5000; // an answer not saved for so long is written by no other window

let listener = () => {};
let frame = 0;
export const onChange = (found) => (listener = found);

// Redraw once per frame, however many changes there were.
export function changed() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    listener();
  });
}

export function announce(text) {
  document.getElementById("live").textContent = text;
}

let toastTimer = 0;
export function toast(text, action = "", act = null) {
  clearTimeout(toastTimer);
  state.toast = { text, action, act };
  toastTimer = setTimeout(() => hideToast(), 10_000);
  changed();
}
export function hideToast() {
  state.toast = null;
  changed();
}

// crypto.randomUUID needs HTTPS, which a phone in the same network does not have.
export function newId() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return Date.now().toString(36) + [...random].map((n) => n.toString(36).padStart(7, "0")).join("");
}

const others = "BroadcastChannel" in globalThis ? new BroadcastChannel("verbatim-chat") : null;
const tell = (chat) => others?.postMessage(chat);

async function save(change) {
  try {
    await db.write(change);
  } catch (error) {
    toast(`This browser could not save: ${error?.message ?? error}. Export what you want to keep.`);
  }
}

// ------------------------------------------------------------------------------- conversations

// The model that was used last; the first one where that is not served.
function usualModel() {
  const last = kept("model");
  return state.models.length && !state.models.some(({ id }) => id === last) ? state.models[0].id : last;
}

const blank = () => ({
  id: newId(), title: "", named: false, created: Date.now(), updated: Date.now(), leaf: null,
  model: usualModel(), settings: structuredClone({ ...SETTINGS, ...keptJson("settings", {}) }),
});

export function newChat() {
  state.chat = blank();
  state.nodes = new Map();
  state.editing = null;
  history.pushState(null, "", location.pathname);
  changed();
}

export const isSaved = (chat) => state.chats.some(({ id }) => id === chat.id);

export async function saveChat(chat = state.chat, { touch = false } = {}) {
  if (touch) chat.updated = Date.now();
  if (touch && !isSaved(chat)) {
    state.chats.push(chat);
    if (chat === state.chat) history.replaceState(null, "", `#${chat.id}`); // a reload opens it again
  }
  state.chats.sort((a, b) => b.updated - a.updated);
  changed();
  if (isSaved(chat)) await save({ put: { chats: [chat] } });
  tell(chat.id);
}

export async function openChat(id) {
  const chat = state.chats.find((one) => one.id === id);
  if (!chat) return newChat();
  if (state.chat?.id !== id) state.editing = null;
  const nodes = await db.ofChat("nodes", id);
  state.chat = chat;
  chat.model ||= usualModel(); // an imported one may have none
  state.nodes = new Map(nodes.map((node) => [node.id, running.get(node.id)?.node ?? node]));
  for (const { node } of running.values()) if (node.chat === id) state.nodes.set(node.id, node);
  await markStale();
  if (location.hash !== `#${id}`) history.pushState(null, "", `#${id}`);
  return changed();
}

export async function removeChat(chat) {
  abandon((node) => node.chat === chat.id);
  const [nodes, receipts] = await Promise.all([db.ofChat("nodes", chat.id), db.ofChat("receipts", chat.id)]);
  const ids = (list) => list.map(({ id }) => id);
  state.chats = state.chats.filter(({ id }) => id !== chat.id);
  if (state.chat.id === chat.id) newChat();
  await save({ drop: { chats: [chat.id], nodes: ids(nodes), receipts: ids(receipts) } });
  tell(chat.id);
  toast(`Deleted “${titleOf(chat)}”.`, "Undo", () => putBack({ chats: [chat], nodes, receipts }));
}

async function putBack(entries) {
  await save({ put: entries });
  await refresh();
  const [chat] = entries.chats ?? [];
  await openChat(chat ? chat.id : state.chat.id);
  tell(state.chat.id);
}

export const titleOf = (chat) => chat.title || "New conversation";

// Read the list again: another window may have changed it.
export async function refresh() {
  const chats = await db.all("chats"), here = state.chat;
  state.chats = chats.map((chat) => (chat.id === here?.id ? Object.assign(here, chat) : chat)).sort((a, b) => b.updated - a.updated);
}

// -------------------------------------------------------------------------------------- messages

export function path(leaf = state.chat.leaf) {
  const nodes = [];
  for (let node = state.nodes.get(leaf); node; node = state.nodes.get(node.parent)) nodes.unshift(node);
  return nodes;
}

export const children = (id) => [...state.nodes.values()].filter((node) => node.parent === id).sort((a, b) => a.created - b.created);
export const siblings = (node) => children(node.parent);

// A new message at the end of the shown path; `keepNode` saves it.
export function addNode(fields) {
  const node = { id: newId(), chat: state.chat.id, created: Date.now(), content: "", status: "done", ...fields };
  state.nodes.set(node.id, node);
  state.chat.leaf = node.id;
  return node;
}

export const keepNode = (node) => Promise.all([save({ put: { nodes: [node] } }), saveChat(state.chat, { touch: true })]);

export async function add(fields) {
  const node = addNode(fields);
  await keepNode(node);
  return node;
}

// End the answers for which this holds, without saving what they have.
function abandon(holds) {
  for (const run of running.values()) {
    if (!holds(run.node)) continue;
    run.gone = true;
    run.stop.abort();
  }
}

// Show a version of a message, with the newest messages that follow it.
export async function pick(node) {
  let last = node;
  for (let next = node; next; next = children(next.id).at(-1)) last = next;
  state.chat.leaf = last.id;
  await saveChat();
}

export async function removeNode(node) {
  const gone = [node];
  for (const one of gone) gone.push(...children(one.id)); // grows while it is read
  const ids = gone.map(({ id }) => id), leaf = state.chat.leaf;
  const chat = { ...state.chat };
  const receipts = (await Promise.all(ids.map((id) => db.one("receipts", id)))).filter(Boolean);
  abandon(({ id }) => ids.includes(id));
  for (const id of ids) state.nodes.delete(id);
  const kin = children(node.parent).at(-1);
  if (kin) await pick(kin);
  else state.chat.leaf = node.parent;
  await Promise.all([save({ drop: { nodes: ids, receipts: ids } }), saveChat()]);
  const what = gone.length > 1 ? `Deleted ${gone.length} messages.` : "Deleted a message.";
  toast(what, "Undo", () => putBack({ chats: [{ ...chat, leaf }], nodes: gone, receipts }));
}

// ------------------------------------------------------------------------- an answer being written

export function saveSoon(node) {
  const run = running.get(node.id);
  if (!run || run.timer) return;
  run.timer = setTimeout(() => {
    run.timer = 0;
    if (running.has(node.id) && !run.gone) saveNode(node);
  }, SAVE_MS);
}

export async function saveNode(node, receipt = null) {
  node.saved = Date.now();
  const put = { nodes: [node], ...(receipt ? { receipts: [{ id: node.id, chat: node.chat, receipt }] } : {}) };
  await save({ put });
  tell(node.chat);
}

// A page that is closed has no time for IndexedDB: what it was writing goes into localStorage, and
// the next page puts it back.
function keepJournal() {
  if (running.size) keepJson("journal", [...running.values()].map(({ node }) => node));
}

async function readJournal() {
  const nodes = keptJson("journal", []);
  for (const node of nodes) Object.assign(node, interrupted(node));
  if (nodes.length) await save({ put: { nodes } });
  keepJson("journal", []);
}

const interrupted = ({ content, reasoning }) => ({
  status: "interrupted",
  error: content || reasoning ? "The page was closed while this was written." : "The page was closed before the answer began.",
});
const isOpen = ({ status }) => status === "waiting" || status === "streaming";

// Answers that no window writes any more, for example after a crash of the browser.
async function markStale() {
  const open = [...state.nodes.values()].filter((node) => isOpen(node) && !running.has(node.id));
  const stale = open.filter((node) => Date.now() - (node.saved ?? node.created) > STALE_MS);
  for (const node of stale) Object.assign(node, interrupted(node));
  if (stale.length) await save({ put: { nodes: stale } });
  if (open.length > stale.length) setTimeout(() => openChat(state.chat.id), STALE_MS);
}

// -------------------------------------------------------------------------------------- start

export async function start() {
  await db.open();
  await readJournal();
  await refresh();
  const id = location.hash.slice(1);
  if (state.chats.some((chat) => chat.id === id)) await openChat(id);
  else {
    state.chat = blank();
    history.replaceState(null, "", location.pathname);
  }
  addEventListener("pagehide", keepJournal);
  addEventListener("hashchange", () => openChat(location.hash.slice(1)));
  addEventListener("popstate", () => {
    const wanted = location.hash.slice(1);
    if (wanted !== state.chat.id) wanted ? openChat(wanted) : newChat();
  });
  others?.addEventListener("message", async ({ data }) => {
    await refresh();
    if (data === state.chat.id && isSaved(state.chat)) await openChat(data);
    changed();
  });
  if (!db.isKept()) toast("This browser keeps no data for this page: conversations end with it. Export what you want to keep.");
}
