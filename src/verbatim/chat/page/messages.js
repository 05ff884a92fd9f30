// The conversation: one article per message of the shown path, with its buttons.

import { html, nothing } from "../lens/vendor/lit-html.js";
import { canGoOn, explain, fileText, goOn, hasResults, isRunning, regenerate, resend, sendResults } from "./answer.js";
import { icon } from "./icons.js";
import { copy, draw, prettyJson } from "./markdown.js";
import { openPanel } from "./panel.js";
import { changed, path, pick, removeNode, running, siblings, state, toast } from "./store.js";

// ----------------------------------------------------------------------------------- texts as DOM

const boxes = new WeakMap(); // node -> {answer, thought}, each {box, text, next}

// The element of a text, drawn again when the text changed. While a long text is written it is
// drawn less often, so that drawing takes at most a quarter of the time.
function drawn(node, name, text, className) {
  if (!boxes.has(node)) boxes.set(node, {});
  const known = (boxes.get(node)[name] ??= { box: document.createElement("div"), text: null, next: 0 });
  const { box } = known, live = running.has(node.id);
  box.className = `md ${className} ${live && node.status === "streaming" ? "live" : ""}`;
  if (known.text === text) return box;
  const now = performance.now();
  if (live && now < known.next) {
    known.timer ??= setTimeout(() => {
      known.timer = null;
      changed();
    }, known.next - now);
    return box;
  }
  const took = draw(box, text);
  Object.assign(known, { text, next: performance.now() + 3 * took });
  return box;
}

function fenced(text, lang) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${fence}${lang}\n${text}\n${fence}`;
}

// An answer that is JSON as a whole is shown as JSON with line breaks.
function shownText(node) {
  if (running.has(node.id)) return node.content;
  const pretty = prettyJson(node.content);
  return pretty === null ? node.content : fenced(pretty, "json");
}

// ------------------------------------------------------------------------------------------ parts

const button = (name, label, act, more = "") => html`<button class="tool ${more}" type="button" title=${label} aria-label=${label} @click=${act}>${icon(name)}</button>`;

async function copyText(text) {
  await copy(text);
  toast("Copied.");
}

function versions(node) {
  const all = siblings(node), at = all.indexOf(node);
  if (all.length < 2) return nothing;
  const step = (by) => () => pick(all[at + by]);
  return html`<span class="versions" role="group" aria-label="versions">
    <button class="tool" aria-label="previous version" title="previous version" ?disabled=${at === 0} @click=${step(-1)}>${icon("left")}</button>
    <span aria-label="version ${at + 1} of ${all.length}" role="img">${at + 1}/${all.length}</span>
    <button class="tool" aria-label="next version" title="next version" ?disabled=${at === all.length - 1} @click=${step(1)}>${icon("right")}</button></span>`;
}

const files = (list = []) => list.length
  ? html`<div class="files">${list.map((file) => html`<details class="file"><summary>${icon("file")}${file.name} <small>${size(file.text)}</small></summary><pre tabindex="0">${file.text}</pre></details>`)}</div>`
  : nothing;

export function size(text) {
  const bytes = new Blob([text]).size;
  return bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1000).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

// -------------------------------------------------------------------------------------- the user's

function userMessage(node) {
  if (state.editing === node.id) return editor(node);
  return html`<article class="turn user" id="n-${node.id}"><h2 class="quiet">You said</h2>
    ${files(node.files)}${node.content ? html`<div class="bubble" dir="auto">${node.content}</div>` : nothing}
    <div class="tools">${versions(node)}
      ${button("copy", "copy", () => copyText([...(node.files ?? []).map(fileText), node.content].join("\n\n").trim()))}
      ${button("edit", "edit and send again", () => { state.editing = node.id; changed(); })}
      ${button("trash", "delete this message and what follows", () => removeNode(node))}</div></article>`;
}

function editor(node) {
  const go = (event) => {
    event.preventDefault();
    const text = new FormData(event.target).get("text");
    if (text.trim() || node.files) resend(node, text);
  };
  const quit = () => { state.editing = null; changed(); };
  const key = (event) => {
    if (event.key === "Escape") (event.stopPropagation(), quit());
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), event.target.form.requestSubmit());
  };
  return html`<article class="turn user"><h2 class="quiet">You said</h2>${files(node.files)}
    <form class="editor" @submit=${go}><textarea name="text" aria-label="edit the message" dir="auto" rows="3" autofocus @keydown=${key} .value=${node.content}></textarea>
      <div class="row"><button type="button" @click=${quit}>Cancel</button><button class="primary">Send</button></div></form></article>`;
}

// ------------------------------------------------------------------------------------- the model's

function thought(node) {
  if (!node.reasoning) return nothing;
  const live = running.has(node.id) && !node.content;
  const label = live ? "Reasoning …" : node.thoughtMs ? `Reasoned for ${number(node.thoughtMs / 1000, 1)} s` : "Reasoning";
  return html`<details class="thought"><summary>${label}</summary>${drawn(node, "thought", node.reasoning, "soft")}</details>`;
}

function callArguments(args) {
  try {
    const fields = Object.entries(JSON.parse(args));
    if (fields.every(([, value]) => value === null || typeof value !== "object") && !/\d{16}/.test(args))
      return html`<dl>${fields.map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl>`;
  } catch {
    // shown as it was written
  }
  return html`<pre tabindex="0">${prettyJson(args) ?? args}</pre>`;
}

function calls(node) {
  if (!node.calls?.length) return nothing;
  const open = !running.has(node.id) && !hasResults(node);
  const go = (event) => {
    event.preventDefault();
    sendResults(node, new FormData(event.target).getAll("result"));
  };
  const card = (call) => html`<div class="call"><p>${icon("tool")}Calls <b>${call.name}</b></p>${callArguments(call.args)}
    ${open ? html`<label>Result <textarea name="result" rows="2" placeholder="what the function returned"></textarea></label>` : nothing}</div>`;
  return html`<form class="calls" @submit=${go}>${node.calls.map(card)}${open ? html`<div class="row"><button>Send ${node.calls.length > 1 ? "results" : "result"}</button></div>` : nothing}</form>`;
}

const toolMessage = (node) => html`<article class="turn result" id="n-${node.id}"><details><summary>Result of <b>${node.name}</b></summary>
  <pre tabindex="0">${prettyJson(node.content) ?? node.content}</pre></details></article>`;

const ENDS = { stopped: "Stopped.", interrupted: "Interrupted.", error: "No answer." };

// Why an answer is not whole, and what to do.
function ending(node) {
  if (running.has(node.id)) return nothing;
  const cut = node.finish === "length", label = ENDS[node.status];
  if (!label && !cut) return nothing;
  const busy = isRunning();
  return html`<div class="ending ${node.status}" role="note"><p><b>${label ?? (node.loop ? "Ended, because it repeats itself." : "Cut at the length limit.")}</b> ${node.status === "stopped" ? "" : node.error}</p>
    ${canGoOn(node) ? html`<button ?disabled=${busy} @click=${() => goOn(node)}>Continue</button>` : nothing}
    ${cut && !label ? nothing : html`<button ?disabled=${busy} @click=${() => regenerate(node)}>Try again</button>`}</div>`;
}

// The ending says that an answer repeats itself, with a button.
const warnings = (node) => (node.warnings ?? []).filter((line) => !(node.loop && line.startsWith("stopped, because"))).map((line) => html`<p class="warning">${line}</p>`);

const brief = (value) => {
  const text = value === null ? "none" : String(value);
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
};

function details(node) {
  const { usage, params = {} } = node;
  const rows = [
    ["Model", node.model], ["Fingerprint", node.fingerprint], ["Seed", node.seed],
    ["Tokens", node.tokens && `${number(node.tokens)} written${usage ? `, ${number(usage.prompt_tokens)} read (${number(usage.prompt_tokens_details.cached_tokens)} cached)` : ""}`],
    ["Speed", node.rate && `${number(node.rate, 1)} tokens per second`],
    ["First token", node.waitMs && `after ${number(node.waitMs / 1000, 2)} s`], ["End", node.finish],
    ...Object.entries(params).filter(([name]) => name !== "seed").map(([name, { value, origin }]) => [name, `${brief(value)} · ${origin}`]),
  ];
  return html`<h3>This answer</h3><dl>${rows.filter(([, value]) => value || value === 0).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

function assistantMessage(node) {
  const live = running.has(node.id), made = node.content || node.reasoning;
  const waiting = live && node.status === "waiting";
  return html`<article class="turn assistant" id="n-${node.id}" aria-busy=${live ? "true" : "false"}><h2 class="who">${node.model || "Assistant"}</h2>
    ${thought(node)}
    ${waiting && !node.content ? html`<p class="waiting"><i></i><i></i><i></i><span class=${node.note ? "" : "quiet"}>${node.note || "waiting for the first token"}</span></p>` : nothing}
    ${node.content ? drawn(node, "answer", shownText(node), "") : nothing}
    ${calls(node)}${warnings(node)}${ending(node)}
    ${live ? nothing : html`<div class="tools">${versions(node)}
      ${node.content ? button("copy", "copy the answer", () => copyText(node.content)) : nothing}
      ${button("again", "another answer", () => regenerate(node))}
      ${made && node.seed !== undefined ? html`<button class="tool wide" title="why these tokens? opens them in the Lens" @click=${() => explain(node)}>${icon("lens")}Explain</button>` : nothing}
      ${button("trash", "delete this message and what follows", () => removeNode(node))}
      ${node.tokens ? html`<button class="tool wide facts" aria-haspopup="dialog" title="details of this answer" @click=${(event) => openPanel(event, "details of this answer", () => details(node))}>${node.rate ? `${number(node.rate, node.rate < 10 ? 1 : 0)} tokens/s` : icon("info")}</button>` : nothing}</div>`}
    ${live && node.rate ? html`<p class="speed">${number(node.tokens)} tokens · ${number(node.rate, 1)} tokens/s</p>` : nothing}</article>`;
}

const VIEWS = { user: userMessage, assistant: assistantMessage, tool: toolMessage };
export const messages = () => path().map((node) => VIEWS[node.role](node));

// The shown path as a Markdown file.
export const asMarkdown = (nodes) => nodes.map(({ role, content, model, name }) =>
  `## ${role === "user" ? "You" : role === "tool" ? `Result of ${name}` : model}\n\n${content}\n`).join("\n");

