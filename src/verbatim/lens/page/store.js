// The state of the page, and the only place that holds it. Views read it and call changed().
//
// A run is a tree of branches. A branch is a list of tokens; each token belongs to a segment, the
// request that drew it:  {id, promptIds, params, from, step, receipt, usage}. `from` is the index of
// its first token. Tokens that two branches share are the same objects, so their numbers and rows
// are shared too.

// what the browser keeps under `name`, after writing `value` if there is one
export function stored(kind, name, value) {
  try {
    if (value !== undefined) globalThis[kind].setItem(name, value);
    return globalThis[kind].getItem(name) ?? "";
  } catch {
    return value ?? ""; // a saved file may have no storage
  }
}

export const state = {
  info: null, vocab: null, offline: false, loading: "connecting to the server …",
  view: "generate", theme: stored("localStorage", "verbatim-theme") || "auto",
  mode: "chat", system: "", input: "Name the capital of France.", turns: [],
  params: {}, // set by the user; everything else is a default
  branches: [], current: null, other: null, // ids; `other` is compared with `current`
  selected: -1, following: false, // the selection moves with the end of the text
  colour: "probability", bytes: false, playing: false,
  whatIf: {}, // settings of the sliders that differ from the segment's own
  trouble: null, proof: null, asking: false, askKey: false,
  rows: new Map(), // "segment:index" -> Row
  engine: null, requests: 0, // requests that have ended
};

const listeners = [];
let scheduled = "";

export const onChange = (listener) => listeners.push(listener);

// Redraw once per frame, however many changes there were. "step": only the panels of the chosen
// step, which a slider changes; their cost does not depend on the length of the text.
export function changed(scope = "all") {
  const waiting = scheduled !== "";
  if (!waiting || scope === "all") scheduled = scope;
  if (waiting) return;
  requestAnimationFrame(() => {
    const drawn = scheduled;
    scheduled = "";
    for (const listener of listeners) listener(drawn);
  });
}

let ids = 0;
export const newId = () => ++ids;
export const keepIdsAbove = (id) => (ids = Math.max(ids, id));

export const branchOf = (id) => state.branches.find((branch) => branch.id === id) ?? null;
export const current = () => branchOf(state.current);
export const isRunning = (branch) => branch?.status === "running" || branch?.status === "waiting";

export function newBranch({ parent = null, forkAt = 0, tokens = [], promptIds, asked = null, label = "" }) {
  const branch = {
    id: newId(), parent, forkAt, tokens: [...tokens], promptIds, asked, label,
    status: "waiting", finish: null, usage: null, warnings: [], loop: 0,
    started: 0, firstToken: 0, error: null,
  };
  state.branches.push(branch);
  return branch;
}

export function select(index) {
  const last = (current()?.tokens.length ?? 0) - 1;
  state.selected = Math.max(-1, Math.min(index, last));
  state.following = false;
  state.whatIf = {};
  changed();
}

export function show(id, index = null) {
  state.current = id;
  state.proof = null;
  if (state.other === id) state.other = null;
  const last = (current()?.tokens.length ?? 0) - 1;
  state.selected = index === null ? Math.min(state.selected, last) : index;
  state.following = false;
  state.whatIf = {};
  changed();
}

// ---------------------------------------------------------------------------------------- undo

const past = [];

export function remember() {
  const { current, other, selected, turns } = state;
  const branches = state.branches.map((branch) => ({ ...branch, tokens: [...branch.tokens] }));
  past.push({ branches, current, other, selected, turns: [...turns] });
  if (past.length > 50) past.shift();
}

export const forget = () => past.pop();

export const canUndo = () => past.length > 0;

export function undo() {
  const before = past.pop();
  if (!before) return;
  const running = new Map(state.branches.filter(isRunning).map((branch) => [branch.id, branch]));
  const branches = before.branches.map((branch) => running.get(branch.id) ?? branch); // these go on
  for (const branch of running.values()) if (!branches.includes(branch)) branch.stop?.abort();
  for (const branch of branches) if (isRunning(branch) && !running.has(branch.id)) branch.status = "stopped";
  Object.assign(state, before, { branches, proof: null, whatIf: {} });
  changed();
}

export function fail(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401) state.askKey = true;
  state.trouble = { message: error.message, param: error.param ?? null, status: error.status };
  if (!error.status && !("param" in error)) console.error(error);
  changed();
}

export function announce(text) {
  const live = document.getElementById("live");
  if (live) live.textContent = text;
}
