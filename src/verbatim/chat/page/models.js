// The models of the server: which there are, which are loaded, their own sampling defaults; and
// whether the server answers at all.

import { get, LOST, post } from "./api.js";
import { keep } from "./kept.js";
import { changed, saveChat, state, toast } from "./store.js";

const RETRY_MS = 1000;
let timer = 0, several = false;

// A model: {id, context_length, sampling, parent (of an adapter), loaded, details}.
export async function loadModels() {
  try {
    const [{ data }, { models: tags }, { ready }] = await Promise.all([get("v1/models"), get("api/tags"), health()]);
    const detailsOf = (id) => tags.find(({ name }) => name === id)?.details ?? {};
    state.models = data.map((model) => ({ loaded: ready, ...model, details: detailsOf(model.id) }));
    several = data.some(({ loaded }) => loaded !== undefined);
    state.reach = ready ? "ok" : "loading";
    state.askKey = false;
    if (!modelOf(state.chat.model) && !state.chat.leaf) state.chat.model = state.models[0]?.id ?? "";
  } catch (error) {
    if (error.status === 401) state.askKey = true;
    state.reach = error.status === 401 ? "ok" : error.message === LOST ? "lost" : "loading";
  }
  clearTimeout(timer);
  if (state.reach !== "ok") timer = setTimeout(loadModels, RETRY_MS);
  changed();
}

export function lostServer() {
  state.reach = "lost";
  loadModels();
}

export const modelOf = (id) => state.models.find((model) => model.id === id);

export async function chooseModel(id) {
  state.chat.model = id;
  keep("model", id);
  await saveChat();
}

// Whether this server has several models, each of which it loads and unloads.
export const canUnload = () => several;

// 503 while the model is loaded: this is no error here.
const health = () => fetch("health").then((response) => response.json(), () => ({ ready: false }));

export async function setLoaded(model, on) {
  model.busy = true;
  changed();
  try {
    await post("api/generate", { model: model.id, stream: false, ...(on ? {} : { keep_alive: 0 }) });
  } catch (error) {
    toast(error.message);
  }
  await loadModels();
}
