// Small values that the browser keeps: theme, key, drafts, presets. Written at once, so that they
// survive a page that is closed. Conversations are in IndexedDB (db.js).

const memory = new Map(); // for a browser that keeps nothing

export function kept(name, otherwise = "") {
  try {
    const text = localStorage.getItem(`verbatim-${name}`);
    return text === null ? otherwise : text;
  } catch {
    return memory.get(name) ?? otherwise;
  }
}

// Returns false where the browser has no room left.
export function keep(name, value) {
  try {
    if (value) localStorage.setItem(`verbatim-${name}`, value);
    else localStorage.removeItem(`verbatim-${name}`);
    return true;
  } catch {
    memory.set(name, value);
    return false;
  }
}

export function keptJson(name, otherwise) {
  try {
    return JSON.parse(kept(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const keepJson = (name, value) => keep(name, JSON.stringify(value));
