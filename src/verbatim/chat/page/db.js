// Conversations in IndexedDB: `chats`, their `nodes` (messages) and the `receipts` of answers, each
// by its id. In: plain objects. Out: promises of them. Where the browser refuses a database, the
// same calls work on memory, and `isKept()` is false.

const STORES = ["chats", "nodes", "receipts"];
const memory = Object.fromEntries(STORES.map((name) => [name, new Map()]));
let database = null;

export const isKept = () => database !== null;

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function open() {
  try {
    const request = indexedDB.open("verbatim-chat", 1);
    request.onupgradeneeded = () => {
      for (const name of STORES) {
        const store = request.result.createObjectStore(name, { keyPath: "id" });
        if (name !== "chats") store.createIndex("chat", "chat");
      }
    };
    database = await promised(request);
    database.onversionchange = () => database.close(); // a newer page waits for this one
  } catch {
    database = null;
  }
}

// Write or delete entries of several stores in one transaction: all of them or none.
export async function write({ put = {}, drop = {} }) {
  const each = (entries, act) => Object.entries(entries).forEach(([name, list]) => list.forEach((item) => act(name, item)));
  if (!database) {
    each(put, (name, item) => memory[name].set(item.id, structuredClone(item)));
    each(drop, (name, id) => memory[name].delete(id));
    return;
  }
  const names = [...new Set([...Object.keys(put), ...Object.keys(drop)])];
  const change = database.transaction(names, "readwrite");
  each(put, (name, item) => change.objectStore(name).put(item));
  each(drop, (name, id) => change.objectStore(name).delete(id));
  await new Promise((resolve, reject) => {
    change.oncomplete = resolve;
    change.onabort = change.onerror = () => reject(change.error);
  });
}

export async function all(name) {
  if (!database) return [...memory[name].values()];
  return promised(database.transaction(name).objectStore(name).getAll());
}

export async function ofChat(name, chat) {
  if (!database) return [...memory[name].values()].filter((item) => item.chat === chat);
  return promised(database.transaction(name).objectStore(name).index("chat").getAll(chat));
}

export async function one(name, id) {
  if (!database) return memory[name].get(id);
  return promised(database.transaction(name).objectStore(name).get(id));
}
