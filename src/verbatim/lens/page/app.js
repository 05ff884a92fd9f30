// The page: layout, and what the buttons do. State in, templates out; the tiles are drawn apart.

import { html, nothing, render } from "./vendor/lit-html.js";
import { get, setKey } from "./api.js";
import { controls } from "./controls.js";
import { engineView, poll, watch } from "./engine.js";
import { fiveSamplers, inspector, loopView } from "./inspector.js";
import { prove } from "./proof.js";
import { openAnswer } from "./receipt.js";
import { extend, send, stopAll } from "./run.js";
import { download, parseRun, restore } from "./save.js";
import { canUndo, changed, current, fail, isRunning, onChange, select, show, state, stored, undo } from "./store.js";
import { COLOURS, Tiles } from "./tiles.js";
import { facts, tree } from "./tree.js";
import { Vocab } from "./vocab.js";

const THEMES = ["auto", "light", "dark"];
const root = document.getElementById("app");
let tiles = null;

function setTheme(theme) {
  state.theme = document.documentElement.dataset.theme = theme;
  stored("localStorage", "verbatim-theme", theme);
  changed();
}

async function load(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const data = parseRun(await file.text()), here = state.info;
    const foreign = !state.offline && data.info.digest !== here.digest;
    stopAll();
    restore(data, { offline: state.offline || foreign });
    if (foreign) state.trouble = { message: `This run was made by ${data.info.model} (${data.info.fingerprint}); this server runs ${here.model} (${here.fingerprint}). The page shows it without the server: reload to generate.` };
  } catch (error) {
    fail(Object.assign(error, { param: null, status: 0 }));
  }
}

// ---------------------------------------------------------------------------------------- parts

function header() {
  const { info, offline } = state, branch = current();
  return html`<header>
    <h1>${offline ? nothing : html`<img src="/lens/icon.svg" alt="" width="22" height="22" />`} Verbatim <span>Lens</span></h1>
    ${info ? html`<p class="pills"><span title="model">${info.model}</span><span title="backend and numerics version">${info.backend} ${info.detail} · ${info.numerics}</span>
      <span title="fingerprint: the same tokens under the same one">${info.fingerprint}</span></p>` : nothing}
    <nav aria-label="views">
      ${["generate", "engine"].map((view) => html`<button class="tab" aria-current=${state.view === view} ?disabled=${offline && view === "engine"}
        @click=${() => { state.view = view; watch(); changed(); }}>${view === "generate" ? "Generate" : "Engine"}</button>`)}
    </nav>
    <p class="row tools">
      <button @click=${undo} ?disabled=${!canUndo()}>Undo</button>
      <button id="prove" @click=${prove} ?disabled=${!branch || offline || branch.status === "running" || state.proof?.state === "running"}>Prove</button>
      <button id="save" @click=${() => download().catch(fail)} ?disabled=${!branch || offline}>Save</button>
      <label class="button">Load<input id="load" class="quiet" type="file" accept=".html,.json,text/html,application/json" @change=${load} /></label>
      <button class="icon" aria-label="theme: ${state.theme}" title="theme: ${state.theme}" @click=${() => setTheme(THEMES[(THEMES.indexOf(state.theme) + 1) % 3])}>${{ auto: "◐", light: "☀", dark: "☾" }[state.theme]}</button>
    </p>
  </header>`;
}

function messages() {
  const { trouble, proof } = state;
  return html`${trouble ? html`<div class="alert" role="alert"><p>${trouble.message}</p>
        ${trouble.param && document.getElementById(`p-${trouble.param}`) ? html`<button class="link" @click=${() => reveal(trouble.param)}>Show ${trouble.param}</button>` : nothing}
        <button class="link" aria-label="dismiss" @click=${() => { state.trouble = null; changed(); }}>Dismiss</button></div>` : nothing}
    ${state.askKey ? html`<form class="alert" @submit=${useKey}>
        <label>API key <input name="key" type="password" autocomplete="off" required /></label><button>Use it</button></form>` : nothing}
    ${proof ? html`<div class="proof ${proof.state}" id="proof" role="status">${proof.state === "running" ? proof.message
        : proof.state === "identical" ? html`<b>Identical.</b> ${proof.message}` : html`<b>Not identical.</b> ${proof.message}`}
        ${proof.index !== null && proof.index !== undefined ? html`<button class="link" @click=${() => select(proof.index)}>Show the token</button>` : nothing}</div>` : nothing}`;
}

function useKey(event) {
  event.preventDefault();
  try {
    setKey(new FormData(event.target).get("key").trim());
  } catch (error) {
    return fail(error);
  }
  state.askKey = false;
  state.trouble = null;
  return open();
}

function reveal(name) {
  const box = document.getElementById(`p-${name}`);
  for (let up = box; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  box.focus();
  return box;
}

function composer() {
  const branch = current();
  const busy = state.asking || isRunning(branch);
  const go = (event, how = send) => {
    event.preventDefault();
    const wrong = document.querySelector(".control :invalid"); // its text is not in force
    if (wrong) reveal(wrong.id.slice(2)).reportValidity();
    else if (!busy && (state.input.trim() || (branch && how !== send))) how();
  };
  return html`<form class="composer card" @submit=${go} aria-label="prompt">
    <div class="row" role="radiogroup" aria-label="kind of prompt">
      ${[["chat", "Chat"], ["raw", "Raw text"]].map(([mode, title]) => html`<label class="choice"><input type="radio" name="mode" .checked=${state.mode === mode}
        ?disabled=${mode === "chat" && state.info && !state.info.has_template} @change=${() => { state.mode = mode; changed(); }} />${title}</label>`)}
      ${state.turns.length || branch?.asked ? html`<button type="button" class="link" @click=${() => { stopAll(); state.turns = []; state.branches = []; show(null, -1); }}>New conversation</button>` : nothing}
    </div>
    ${state.mode === "chat" ? html`<input class="system" aria-label="system message" placeholder="system message (optional)" .value=${state.system} @input=${(e) => { state.system = e.target.value; }} />` : nothing}
    <textarea id="prompt" rows="3" dir="auto" aria-label="prompt" .value=${state.input} @input=${(e) => { state.input = e.target.value; }}
      @keydown=${(e) => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) go(e); }}></textarea>
    <div class="row">
      <button class="primary" id="send" ?disabled=${busy || !state.info}>Generate</button>
      <button type="button" id="step" ?disabled=${busy || !state.info} title="one more token, under the settings of this branch"
        @click=${(e) => go(e, () => extend().then(() => select((current()?.tokens.length ?? 0) - 1)))}>Step</button>
      <button type="button" id="stop" ?disabled=${!busy} @click=${stopAll}>Stop</button>
    </div>
  </form>`;
}

function conversation() {
  const branch = current();
  const asked = branch?.asked ?? state.turns;
  return html`${(state.mode === "chat" ? asked : []).map((turn) => html`<p class="turn"><b>${turn.role}</b> <bdi>${turn.content}</bdi></p>`)}
    ${branch ? html`<details class="context"><summary>Context: ${branch.promptIds.length} ${branch.promptIds.length === 1 ? "token" : "tokens"} the model reads</summary>
        ${promptTokens(branch.promptIds)}</details>` : nothing}`;
}

// Plain DOM, made once per prompt: a template of 8,000 tokens would be compared in every frame.
let prompt = { ids: null, node: null };

function promptTokens(ids) {
  if (prompt.ids !== ids) {
    const node = document.createElement("p");
    node.className = "prompt-tokens";
    for (const id of ids) {
      const token = document.createElement("span");
      token.textContent = state.vocab.show(id);
      token.title = `id ${id}`;
      token.classList.toggle("control", state.vocab.isControl(id));
      node.append(token);
    }
    prompt = { ids, node };
  }
  return prompt.node;
}

function legend() {
  const [, low, high] = COLOURS[state.colour];
  return html`<div class="row legend-bar"><label>Colour <select id="colour" @change=${(e) => { state.colour = e.target.value; changed(); }}>
      ${Object.entries(COLOURS).map(([name, [title]]) => html`<option value=${name} ?selected=${name === state.colour}>${title}</option>`)}</select></label>
    <span class="ramp"><span>${low}</span><i></i><span>${high}</span></span>
    <label class="choice"><input type="checkbox" id="bytes" .checked=${state.bytes} @change=${(e) => { state.bytes = e.target.checked; changed(); }} />ids and bytes</label></div>`;
}

function sequence() {
  const branch = current();
  return html`<section class="card sequence" aria-label="the sequence">${conversation()}${branch ? legend() : nothing}
    <div id="tiles" class="tiles" role=${branch?.tokens.length ? "listbox" : "group"} aria-label="output tokens" tabindex=${branch?.tokens.length ? 0 : -1}></div>
    ${branch ? facts(branch) : html`<p class="welcome">Ask something. Every token shows how likely it was, what else was possible, and why it was drawn.</p>`}</section>`;
}

function page() {
  if (!state.info) return html`${header()}${messages()}<main><p class="hint loading">${state.askKey ? "This server needs an API key." : state.loading}</p></main>`;
  const engine = state.view === "engine";
  return html`<a class="skip" href=${engine ? "#steps" : "#tiles"}>Skip to the ${engine ? "steps" : "tokens"}</a>${header()}${messages()}
    ${engine ? html`<main class="engine" id="steps" tabindex="-1">${engineView()}</main>` : generateView()}`;
}

function generateView() {
  return html`<main class="generate">
    <aside class="left" aria-label="parameters" ?hidden=${state.offline}><details class="card params" ?open=${!current()}><summary><b>Parameters</b> <small>of the next prompt</small></summary>${state.offline ? nothing : controls()}</details></aside>
    <div class="middle">${state.offline ? nothing : composer()}${sequence()}${panels.step}${tree()}${panels.samplers}</div>
    ${panels.right}</main>`;
}

// The panels of the chosen step, each rendered by itself: a slider's redraw touches nothing else.
const panels = Object.fromEntries(["step", "samplers", "right"].map((name) => {
  const node = document.createElement("div");
  node.className = `panel ${name}`;
  return [name, node];
}));

function draw(scope) {
  if (scope === "all") render(page(), root);
  if (state.info && state.view === "generate") {
    render(loopView(), panels.step);
    render(fiveSamplers(), panels.samplers);
    render(inspector(), panels.right);
  }
  if (scope === "step") return;
  const box = document.getElementById("tiles");
  if (box && tiles?.box !== box) tiles = new Tiles(box);
  if (box && state.vocab) tiles.render();
  document.body.dataset.requests = state.requests; // scripts wait for it
}

// ----------------------------------------------------------------------------------------- start

async function open() {
  try {
    const [info, vocab] = await Promise.all([get("/lens/api/info"), get("/lens/api/vocab")]);
    state.info = info;
    state.vocab = Vocab.fromServer(vocab);
    state.trouble = null;
    if (!info.has_template) state.mode = "raw";
    poll(); // the server records steps from now on
    openAnswer().catch(fail);
  } catch (error) {
    if (error.status === 503 || error.status === 0) {
      state.loading = error.status ? "the model is being loaded …" : error.message;
      setTimeout(open, 1000);
    } else fail(error);
  }
  changed();
}

function openSaved(text) {
  try {
    restore(parseRun(text), { offline: true });
  } catch (error) {
    Object.assign(state, { loading: error.message, offline: true });
    changed();
  }
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, [role=listbox]")) return;
  if (event.key === "ArrowRight") select(state.selected + 1);
  if (event.key === "ArrowLeft") select(Math.max(0, state.selected - 1));
  if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
});

onChange(draw);
setTheme(state.theme);
const saved = document.getElementById("run");
if (saved) openSaved(saved.textContent);
else open();
