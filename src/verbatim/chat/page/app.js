// The page: layout, keyboard, and what happens when the browser or the server says something.

import { html, nothing, render } from "../lens/vendor/lit-html.js";
import { stopAll, isRunning } from "./answer.js";
import { hasKey, setKey } from "./api.js";
import { addFiles, composer, focus } from "./composer.js";
import { icon } from "./icons.js";
import { copy } from "./markdown.js";
import { messages } from "./messages.js";
import { canUnload, chooseModel, loadModels, modelOf, setLoaded } from "./models.js";
import { closePanel, openPanel, panel } from "./panel.js";
import { changes, drawer } from "./settings.js";
import { setTheme, sidebar, startChat } from "./sidebar.js";
import { changed, hideToast, onChange, path, start, state, titleOf, toast } from "./store.js";

const root = document.getElementById("app");
const MAC = navigator.platform.startsWith("Mac");
const CTRL = MAC ? "⌘" : "Ctrl";
const KEYS = [
  ["Enter", "send"], ["Shift Enter", "new line"], ["Esc", "stop the answer"], ["↑ in an empty message", "edit your last message"],
  [`${CTRL} Shift O`, "new chat"], [`${CTRL} K`, "search the conversations"], [`${CTRL} ,`, "settings"], [`${CTRL} Shift C`, "copy the last answer"],
  [`${CTRL} /`, "this list"],
];

// ------------------------------------------------------------------------------------------- parts

function modelPanel() {
  const several = canUnload();
  const row = (model) => {
    const facts = [model.details.parameter_size, model.details.quantization_level, model.context_length && `${model.context_length.toLocaleString("en")} tokens`].filter(Boolean).join(" · ");
    return html`<li><button class="item" aria-pressed=${model.id === state.chat.model ? "true" : "false"} @click=${() => { closePanel(); chooseModel(model.id); }}>
        <i class="dot ${model.loaded ? "on" : ""}" title=${model.loaded ? "loaded" : "not loaded"}></i><span><b>${model.id}</b><small>${facts}${several && !model.loaded ? `${facts ? " · " : ""}not loaded` : ""}</small></span>${model.id === state.chat.model ? icon("check") : nothing}</button>
      ${several && !model.parent ? html`<button ?disabled=${model.busy} @click=${() => setLoaded(model, !model.loaded)}>${model.busy ? "…" : model.loaded ? "Unload" : "Load"}</button>` : nothing}</li>`;
  };
  return html`<h3>Models</h3><ul class="models">${state.models.map(row)}</ul>`;
}

function header() {
  const { chat } = state, gone = chat.model && state.models.length && !modelOf(chat.model);
  const show = () => { state.sidebar = true; delete document.documentElement.dataset.list; changed(); };
  return html`<header><button class="tool show-list" title="conversations" aria-label="show the conversations" @click=${show}>${icon("menu")}</button>
    <button class="model" aria-haspopup="dialog" title="choose a model" @click=${(event) => { loadModels(); openPanel(event, "models", modelPanel); }}><span>${chat.model || "…"}</span>${gone ? html`<small> not served</small>` : nothing}${icon("down")}</button>
    <h1 class="quiet">${titleOf(chat)}</h1>
    <button class="tool only-phone" title="new chat" aria-label="new chat" @click=${startChat}>${icon("plus")}</button>
    <button class="tool" id="settings" title="settings (${CTRL} ,)" aria-label="settings" aria-expanded=${state.drawer ? "true" : "false"} @click=${() => { state.drawer = !state.drawer; changed(); }}>${icon("sliders")}${changes() ? html`<i class="dot" title="changed"></i>` : nothing}</button></header>`;
}

const REACH = { lost: "The server does not answer. This page goes on as soon as it does.", loading: "The model is being loaded …" };

function banner() {
  if (state.askKey) return nothing;
  return REACH[state.reach] ? html`<p class="banner ${state.reach}" role="status">${REACH[state.reach]}</p>` : nothing;
}

function welcome() {
  return html`<div class="welcome"><h2>What would you like to know?</h2>
    <p>Answers come from <b>${state.chat.model || "the model"}</b> on this server. Conversations stay in this browser, and <b>Explain</b> shows why each token was chosen.</p></div>`;
}

function keyForm() {
  const use = (event) => {
    event.preventDefault();
    try {
      setKey(new FormData(event.target).get("key").trim());
    } catch (error) {
      return toast(error.message);
    }
    state.askKey = false;
    changed();
    return loadModels();
  };
  return html`<dialog id="key" aria-label="API key" @close=${() => { state.askKey = false; changed(); }}><form method="dialog" @submit=${use}><h2>API key</h2>
    <p>A server with keys asks for one. It is kept in this browser and sent to this server only.</p>
    <input name="key" type="password" autocomplete="off" aria-label="API key" autofocus placeholder=${hasKey() ? "a key is kept; type another, or leave this empty to forget it" : ""} />
    <div class="row"><button type="button" @click=${(event) => event.target.closest("dialog").close()}>Cancel</button><button class="primary">Use it</button></div></form></dialog>`;
}

const keysDialog = () => html`<dialog id="keys" aria-label="keyboard shortcuts"><h2>Keyboard</h2><dl>${KEYS.map(([keys, what]) => html`<dt><kbd>${keys}</kbd></dt><dd>${what}</dd>`)}</dl>
  <form method="dialog" class="row"><button autofocus>Close</button></form></dialog>`;

const showKeys = () => document.getElementById("keys").showModal();

function toastView() {
  const { toast: found } = state;
  if (!found) return nothing;
  return html`<div class="toast" role="status"><span>${found.text}</span>
    ${found.action ? html`<button class="link" @click=${() => { hideToast(); found.act(); }}>${found.action}</button>` : nothing}
    <button class="tool" aria-label="dismiss" @click=${hideToast}>${icon("close")}</button></div>`;
}

function view() {
  const empty = !state.chat.leaf;
  return html`<a class="skip" href="#message" @click=${(event) => { event.preventDefault(); focus(); }}>Skip to the message</a>
    ${sidebar(showKeys)}<div class="shade" @click=${() => { state.sidebar = false; state.drawer = false; changed(); }}></div>
    <main class=${empty ? "empty" : ""}>${header()}${banner()}
      <div id="scroll" class="scroll" tabindex="0" role="region" aria-label="conversation" @scroll=${scrolled}><div class="thread">${empty ? welcome() : messages()}</div></div>
      <button class="round latest" title="to the end" aria-label="to the end" ?hidden=${following || empty} @click=${() => { following = true; changed(); }}>${icon("down")}</button>
      <div class="dock">${composer()}${empty ? nothing : html`<p class="hint small">A model can be wrong. <b>Explain</b> shows what else it might have said.</p>`}</div></main>
    ${drawer()}${panel()}${toastView()}${keyForm()}${keysDialog()}
    ${state.dropping ? html`<div class="dropping">Drop text files to add them to your message</div>` : nothing}`;
}

// ------------------------------------------------------------------------------- drawing, scrolling

let following = true; // the end of the conversation stays in view
let shownChat = null;

const box = () => document.getElementById("scroll");
const atEnd = ({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight < 40;

function scrolled() {
  const now = atEnd(box());
  if (now === following) return;
  following = now;
  changed();
}

function redraw() {
  document.title = state.chat.title ? `${state.chat.title} · Verbatim` : "Verbatim";
  document.documentElement.toggleAttribute("data-sidebar", state.sidebar);
  document.documentElement.toggleAttribute("data-drawer", state.drawer);
  if (shownChat !== state.chat.id) following = true;
  shownChat = state.chat.id;
  render(view(), root);
  const key = document.getElementById("key");
  if (state.askKey && !key.open) key.showModal();
  if (!state.askKey && key.open) key.close();
  if (following) box().scrollTop = box().scrollHeight;
  const edited = document.querySelector(".editor textarea");
  if (edited && !edited.dataset.seen) (edited.dataset.seen = "yes", edited.focus(), edited.scrollIntoView({ block: "nearest" }));
}

// ------------------------------------------------------------------------------- keys, dropped files

function search() {
  state.sidebar = true;
  delete document.documentElement.dataset.list;
  changed();
  requestAnimationFrame(() => requestAnimationFrame(() => document.getElementById("search").focus()));
}

async function copyLast() {
  const last = path().findLast(({ role, content }) => role === "assistant" && content);
  if (!last) return;
  await copy(last.content);
  toast("Copied the last answer.");
}

const SHORTCUTS = {
  "shift+o": startChat, k: search, ",": () => { state.drawer = !state.drawer; changed(); }, "shift+c": copyLast, "/": showKeys,
};

function pressed(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
    if (isRunning()) stopAll();
    else if (state.drawer || state.sidebar) (Object.assign(state, { drawer: false, sidebar: false }), changed());
  }
  if (!(MAC ? event.metaKey : event.ctrlKey)) return;
  const act = SHORTCUTS[`${event.shiftKey && /[a-z]/i.test(event.key) ? "shift+" : ""}${event.key.toLowerCase()}`];
  if (!act) return;
  event.preventDefault();
  act();
}

function dragged(event) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  const on = event.type === "dragover";
  if (event.type === "drop") addFiles(event.dataTransfer.files);
  if (state.dropping !== on) (Object.assign(state, { dropping: on }), changed());
}

await start();
onChange(redraw);
setTheme(state.theme);
addEventListener("keydown", pressed);
for (const type of ["dragover", "drop"]) addEventListener(type, dragged);
addEventListener("dragleave", (event) => event.relatedTarget ?? (state.dropping = false, changed()));
addEventListener("focus", () => state.reach === "lost" && loadModels());
changed();
await loadModels();
requestAnimationFrame(focus);
document.body.dataset.ready = "yes"; // scripts wait for it
