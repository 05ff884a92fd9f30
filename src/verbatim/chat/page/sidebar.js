// The list of conversations: search, groups by age, and the menu of one.

import { html, nothing } from "../lens/vendor/lit-html.js";
import { isRunning } from "./answer.js";
import { hasKey } from "./api.js";
import { focus } from "./composer.js";
import { exportAll, exportMarkdown, importAll } from "./files.js";
import { icon } from "./icons.js";
import { keep } from "./kept.js";
import { closePanel, openPanel } from "./panel.js";
import { changed, newChat, openChat, removeChat, saveChat, state, titleOf } from "./store.js";

const DAY = 86_400_000;
const THEMES = { auto: "auto", light: "sun", dark: "moon" };

export function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  keep("theme", theme);
  changed();
}

export function startChat() {
  newChat();
  state.sidebar = false;
  requestAnimationFrame(focus);
}

function groups() {
  const midnight = new Date().setHours(0, 0, 0, 0), wanted = state.search.trim().toLowerCase();
  const label = ({ updated }) => updated >= midnight ? "Today" : updated >= midnight - DAY ? "Yesterday"
    : updated >= midnight - 7 * DAY ? "The last seven days" : new Date(updated).toLocaleDateString("en", { month: "long", year: "numeric" });
  const found = state.chats.filter((chat) => titleOf(chat).toLowerCase().includes(wanted));
  return Object.entries(Object.groupBy ? Object.groupBy(found, label) : found.reduce((all, chat) => ({ ...all, [label(chat)]: [...(all[label(chat)] ?? []), chat] }), {}));
}

function menu(chat) {
  const act = (what) => () => { closePanel(); what(chat); };
  const rename = (event) => {
    event.preventDefault();
    const title = new FormData(event.target).get("title").trim();
    if (title) Object.assign(chat, { title, named: true });
    closePanel();
    saveChat(chat);
  };
  return html`<form class="rename" @submit=${rename}><label>Name <input name="title" autocomplete="off" .value=${titleOf(chat)} /></label><button>Rename</button></form>
    <button class="item" @click=${act(exportMarkdown)}>${icon("out")}Save as Markdown</button>
    <button class="item danger" @click=${act(removeChat)}>${icon("trash")}Delete</button>`;
}

function entry(chat) {
  const here = chat.id === state.chat.id;
  const go = (event) => {
    if (event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    state.sidebar = false;
    openChat(chat.id).then(() => requestAnimationFrame(focus));
  };
  return html`<li class=${here ? "here" : ""}><a href="#${chat.id}" aria-current=${here ? "page" : nothing} @click=${go}>${titleOf(chat)}</a>
    ${isRunning(chat.id) ? html`<i class="dot" title="being written"></i>` : nothing}
    <button class="tool" aria-haspopup="dialog" aria-label="menu of ${titleOf(chat)}" title="rename, save, delete" @click=${(event) => openPanel(event, `menu of ${titleOf(chat)}`, () => menu(chat))}>${icon("more")}</button></li>`;
}

const next = () => Object.keys(THEMES)[(Object.keys(THEMES).indexOf(state.theme) + 1) % 3];

function pageMenu(showKeys) {
  const item = (name, label, act) => html`<button class="item" @click=${() => { closePanel(); act(); }}>${icon(name)}${label}</button>`;
  const take = (event) => {
    closePanel();
    importAll(event.target.files[0]);
    event.target.value = "";
  };
  return html`${item("out", "Export all conversations", exportAll)}
    <label class="item">${icon("into")}Import conversations<input id="import" type="file" accept=".json,application/json" class="quiet" @change=${take} /></label>
    ${item("key", "API key", () => { state.askKey = true; changed(); })}
    ${item("keys", "Keyboard shortcuts", showKeys)}
    <button class="item" id="theme" @click=${() => setTheme(next())}>${icon(THEMES[state.theme])}Theme: ${state.theme}</button>
    <a class="item" href="lens">${icon("lens")}The Lens: how each token is made</a>
    ${hasKey() ? nothing : html`<a class="item" href="docs">${icon("info")}API reference</a>`}`; // it needs the key in a header
}

const footer = (showKeys) => html`<button class="item foot" id="more" aria-haspopup="dialog" @click=${(event) => openPanel(event, "menu", () => pageMenu(showKeys))}>${icon("more")}More</button>`;

export function sidebar(showKeys) {
  const list = groups();
  return html`<nav class="sidebar ${state.sidebar ? "open" : ""}" aria-label="conversations">
    <div class="row head"><b class="brand">Verbatim</b><button class="tool" title="hide the list" aria-label="hide the list" @click=${() => { state.sidebar = !state.sidebar; document.documentElement.dataset.list = "hidden"; changed(); }}>${icon("menu")}</button></div>
    <button class="new" @click=${startChat}>${icon("plus")}New chat</button>
    <input id="search" type="search" placeholder="Search" aria-label="search the conversations" .value=${state.search} @input=${(event) => { state.search = event.target.value; changed(); }} />
    <div class="list" tabindex=${list.length ? nothing : -1}>${list.map(([label, chats]) => html`<h2>${label}</h2><ul>${chats.map(entry)}</ul>`)}
      ${list.length ? nothing : html`<p class="hint">${state.search ? "Nothing has this name." : "Your conversations stay in this browser."}</p>`}</div>
    ${footer(showKeys)}</nav>`;
}
