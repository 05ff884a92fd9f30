// The composer: a message, the files dropped into it, send and stop. What is typed is kept at once,
// per conversation, so a reload loses no draft.

import { html, nothing } from "../lens/vendor/lit-html.js";
import { isRunning, send, stopAll } from "./answer.js";
import { textsOf } from "./files.js";
import { icon } from "./icons.js";
import { size } from "./messages.js";
import { keepJson, keptJson } from "./kept.js";
import { modelOf } from "./models.js";
import { changed, path, state, toast } from "./store.js";

const draftName = () => `draft-${state.chat.leaf ? state.chat.id : "new"}`;
let shown = { name: "", text: "", files: [] };

export function draft() {
  const name = draftName();
  if (shown.name !== name) shown = { name, text: "", files: [], ...keptJson(name, {}) };
  return shown;
}

function keepDraft() {
  const { name, text, files } = shown;
  if (keepJson(name, text || files.length ? { text, files } : null)) return;
  keepJson(name, { text, files: [] });
}

function clear() {
  Object.assign(shown, { text: "", files: [] });
  keepDraft();
}

export async function addFiles(list) {
  const added = await textsOf([...list]); // the list of an input empties with it
  const here = draft();
  here.files = [...here.files, ...added];
  keepDraft();
  changed();
  focus();
}

export const focus = () => document.getElementById("message")?.focus();

function submit(event) {
  event?.preventDefault();
  const { text, files } = draft();
  if (isRunning() || !(text.trim() || files.length)) return;
  if (!state.chat.model) return toast("The server has not said yet which models it has.");
  clear();
  send(text.trim(), files);
  changed();
}

function key(event) {
  const touch = matchMedia("(pointer: coarse)").matches; // a phone has no Shift: its Enter is a line
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) submit(event);
  if (event.key === "ArrowUp" && !event.target.value) {
    const last = path().findLast(({ role }) => role === "user");
    if (last) (event.preventDefault(), Object.assign(state, { editing: last.id }), changed());
  }
}

function paste(event) {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  addFiles(event.clipboardData.files);
}

// How much of the model's context the conversation fills.
function context() {
  const used = path().findLast(({ context: tokens }) => tokens)?.context, most = modelOf(state.chat.model)?.context_length;
  if (!used || !most) return nothing;
  const full = used / most;
  return html`<span class=${full > 0.85 ? "nearly" : ""} title="tokens of this conversation, of those that the model can read">${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens</span>`;
}

export function composer() {
  const here = draft(), busy = isRunning(), empty = !here.text.trim() && !here.files.length;
  const drop = (i) => { here.files = here.files.filter((_, at) => at !== i); keepDraft(); changed(); };
  return html`<form class="composer" aria-label="new message" @submit=${submit}>
    ${here.files.length ? html`<ul class="chips">${here.files.map((file, i) => html`<li>${icon("file")}${file.name} <small>${size(file.text)}</small>
      <button type="button" class="tool" aria-label="remove ${file.name}" @click=${() => drop(i)}>${icon("close")}</button></li>`)}</ul>` : nothing}
    <textarea id="message" rows="1" dir="auto" aria-label="message" placeholder="Message ${state.chat.model || "the model"}" .value=${here.text}
      @input=${(event) => { here.text = event.target.value; keepDraft(); changed(); }} @keydown=${key} @paste=${paste}></textarea>
    <div class="row"><label class="tool" title="add text files">${icon("attach")}<input type="file" multiple class="quiet" aria-label="add text files" @change=${(event) => { addFiles(event.target.files); event.target.value = ""; }} /></label>
      <span class="hint">${context()}</span>
      ${busy ? html`<button type="button" id="stop" class="round" title="stop (Esc)" aria-label="stop" @click=${() => stopAll()}>${icon("stop")}</button>`
        : html`<button id="send" class="round primary" title="send (Enter)" aria-label="send" ?disabled=${empty || !state.chat.model}>${icon("send")}</button>`}</div></form>`;
}
