// The drawer: what this conversation sends with its messages. A control that is not set sends
// nothing, and shows the value that the model will use and where that comes from.

import { html, nothing } from "../lens/vendor/lit-html.js";
import { parsed } from "./answer.js";
import { icon } from "./icons.js";
import { keepJson, keptJson } from "./kept.js";
import { modelOf } from "./models.js";
import { changed, saveChat, SETTINGS, state, toast } from "./store.js";

// name -> [label, help, least, most, step of the slider]
const SLIDERS = {
  temperature: ["Temperature", "0: always the most likely token. Higher: more variety.", 0, 2, 0.05],
  top_p: ["Top p", "Only the most likely tokens that together have this probability. 1: off.", 0.01, 1, 0.01],
  top_k: ["Top k", "Only this many of the most likely tokens. 0: off.", 0, 200, 1],
  min_p: ["Min p", "Only tokens with at least this share of the best one's probability. 0: off.", 0, 1, 0.01],
  repetition_penalty: ["Repetition penalty", "Above 1: tokens that have occurred become less likely. 1: off.", 0.8, 1.5, 0.01],
  presence_penalty: ["Presence penalty", "Above 0: tokens that the answer already has become less likely. 0: off.", -2, 2, 0.1],
};
const BOXES = {
  max_completion_tokens: ["Length limit", "Tokens of one answer. Empty: until the model ends it."],
  seed: ["Seed", "The same request with the same seed has the same answer. Empty: the server chooses one."],
};
const OWN_NAMES = { max_completion_tokens: "max_tokens" }; // the model's own names
const EFFORTS = ["none", "low", "medium", "high"];
const BUILT_IN = { "The model's own": {}, "Always the most likely (temperature 0)": { temperature: 0 } };

const settings = () => state.chat.settings;

function set(changes) {
  Object.assign(settings(), changes);
  saveChat();
}

function setParam(name, value) {
  const params = { ...settings().params };
  if (value === undefined) delete params[name];
  else params[name] = value;
  set({ params });
}

export const changes = () => JSON.stringify(settings()) !== JSON.stringify(SETTINGS);

// ------------------------------------------------------------------------------------- sampling

const OFF = { presence_penalty: 0 }; // not among the parameters that a model may state

function ownValue(name) {
  const stated = modelOf(state.chat.model)?.sampling?.[OWN_NAMES[name] ?? name];
  if (stated) return stated;
  return name in OFF ? { value: OFF[name], origin: "default" } : null;
}

function origin(name) {
  const own = ownValue(name);
  if (settings().params[name] !== undefined)
    return html`<small><button class="link" type="button" @click=${() => setParam(name, undefined)}>Use the model's${own?.value === null || !own ? "" : `: ${own.value}`}</button></small>`;
  if (!own) return nothing;
  const source = own.origin.startsWith("default") ? "server default" : own.origin;
  return html`<small>${own.value === null ? "no limit" : own.value} · ${source}</small>`;
}

function slider([name, [label, help, low, high, step]]) {
  const mine = settings().params[name], value = mine ?? ownValue(name)?.value ?? "";
  const take = (event) => {
    const typed = event.target.valueAsNumber;
    if (Number.isNaN(typed)) setParam(name, undefined);
    else setParam(name, typed);
  };
  return html`<div class="field ${mine === undefined ? "" : "mine"}"><label for="s-${name}" title=${help}>${label}</label>
    <input id="s-${name}" type="number" step="any" .value=${String(value)} @change=${take} />
    <input type="range" aria-label="${label}, slider" min=${low} max=${high} step=${step} .value=${String(value === "" ? low : value)} @input=${take} />
    <small class="help">${help}</small>${origin(name)}</div>`;
}

function box([name, [label, help]]) {
  const mine = settings().params[name];
  const take = (event) => setParam(name, event.target.value === "" ? undefined : event.target.valueAsNumber);
  return html`<div class="field ${mine === undefined ? "" : "mine"}"><label for="s-${name}" title=${help}>${label}</label>
    <input id="s-${name}" type="number" step="1" min="0" placeholder=${name === "seed" ? "chosen" : "none"} .value=${String(mine ?? "")} @change=${take} />
    <small class="help">${help}</small></div>`;
}

const same = (a, b) => JSON.stringify(Object.entries(a).sort()) === JSON.stringify(Object.entries(b).sort());

function presets() {
  const saved = keptJson("presets", {}), all = { ...BUILT_IN, ...saved };
  const here = Object.keys(all).find((name) => same(all[name], settings().params));
  return named({
    label: "Preset", id: "preset", all, here, saved, kind: "presets",
    choose: (name) => set({ params: { ...all[name] } }), value: () => settings().params,
  });
}

// A list of named values, with buttons that save the shown one and delete a saved one.
function named({ label, id, all, here, saved, kind, choose, value }) {
  const save = (event) => {
    event.preventDefault();
    const name = new FormData(event.target).get("name").trim();
    if (!name) return;
    keepJson(kind, { ...saved, [name]: value() });
    event.target.reset();
    toast(`Saved “${name}”.`);
  };
  const remove = () => {
    const { [here]: gone, ...rest } = saved;
    keepJson(kind, rest);
    toast(`Deleted “${here}”.`, "Undo", () => { keepJson(kind, { ...keptJson(kind, {}), [here]: gone }); changed(); });
  };
  const single = Object.keys(all).length === 1 && here !== undefined;
  return html`<div class="named" ?hidden=${single}><label for=${id}>${label}</label>
    <select id=${id} @change=${(event) => choose(event.target.value)}>
      ${here === undefined ? html`<option selected disabled>not saved</option>` : nothing}
      ${Object.keys(all).map((name) => html`<option .value=${name} ?selected=${name === here}>${name}</option>`)}</select>
    ${here !== undefined && here in saved ? html`<button class="tool" type="button" title="delete ${here}" aria-label="delete ${here}" @click=${remove}>${icon("trash")}</button>` : nothing}
    ${here === undefined ? html`<form class="row" @submit=${save}><input name="name" autocomplete="off" aria-label="name for the ${label.toLowerCase()}" placeholder="name" /><button>Save</button></form>` : nothing}</div>`;
}

// ------------------------------------------------------------------------------------ the drawer

function system() {
  const saved = keptJson("prompts", {}), all = { None: "", ...saved };
  const here = Object.keys(all).find((name) => all[name] === settings().system);
  return html`<section><h3>System prompt</h3>
    ${named({ label: "Prompt", id: "prompt-name", all, here, saved, kind: "prompts", choose: (name) => set({ system: all[name] }), value: () => settings().system })}
    <textarea id="system" rows="4" dir="auto" aria-label="system prompt" placeholder="What the model should know before every answer. Empty: the model's own." .value=${settings().system} @change=${(event) => set({ system: event.target.value })} @input=${(event) => { settings().system = event.target.value; changed(); }}></textarea></section>`;
}

function jsonBox(name, label, help, placeholder) {
  const take = (event) => {
    try {
      parsed(name, event.target.value);
      event.target.setCustomValidity("");
    } catch (error) {
      event.target.setCustomValidity(error.message);
      toast(error.message);
    }
    set({ [name]: event.target.value });
  };
  return html`<label class="stack">${label}<textarea id="s-${name}" rows="3" spellcheck="false" placeholder=${placeholder} .value=${settings()[name]} @change=${take}></textarea><small>${help}</small></label>`;
}

function advanced() {
  const { schema, tools, more } = settings();
  return html`<details ?open=${Boolean(schema || tools || more)}><summary>Tools and structured output</summary>
    ${jsonBox("schema", "JSON schema", "The answer is JSON that this schema allows.", '{"type": "object", …}')}
    ${jsonBox("tools", "Tools", "Functions that the model may call; you type what they return.", '[{"name": "weather", "parameters": {…}}]')}
    ${jsonBox("more", "More request fields", "Any other field of /v1/chat/completions. An unknown one is refused by name.", '{"top_n_sigma": 1}')}</details>`;
}

export function drawer() {
  if (!state.drawer) return nothing;
  const close = () => { state.drawer = false; changed(); };
  const model = modelOf(state.chat.model);
  return html`<aside class="drawer" aria-label="settings of this conversation"><div class="row head"><h2>Settings</h2><button class="tool" title="close" aria-label="close the settings" @click=${close}>${icon("close")}</button></div>
    <p class="hint">For this conversation. What you leave alone is not sent, and the model's own value holds.</p>
    ${system()}
    <section><h3>Sampling</h3>${presets()}
      ${model && !model.sampling ? html`<p class="hint">The model's own values are known once it is loaded.</p>` : nothing}
      ${Object.entries(SLIDERS).map(slider)}${Object.entries(BOXES).map(box)}
      <div class="field"><label for="s-reasoning" title="for models that reason">Reasoning</label><select id="s-reasoning" @change=${(event) => set({ reasoning: event.target.value })}>
        <option value="" ?selected=${!settings().reasoning}>the model's own</option>${EFFORTS.map((effort) => html`<option value=${effort} ?selected=${effort === settings().reasoning}>${effort === "none" ? "off" : effort}</option>`)}</select></div>
    </section>
    <section>${advanced()}</section>
    <div class="row">${changes() ? html`<button @click=${() => set(structuredClone(SETTINGS))}>Reset all</button>` : nothing}
      <button @click=${() => { keepJson("settings", settings()); toast("New conversations start with these settings."); }}>Use for new chats</button></div></aside>`;
}
