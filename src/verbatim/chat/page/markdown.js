// Markdown of a model -> DOM. Everything is hostile: marked writes HTML without the model's own
// tags, DOMPurify keeps a short list of elements, and links have http(s) or mailto only. Pictures
// of other hosts become links, because the page loads nothing from another host.
//
// An answer is redrawn block by block: a block whose source did not change keeps its elements, and
// with them the reader's selection.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;
const TAGS = (
  "p br hr em strong del code pre blockquote ul ol li table thead tbody tr th td h3 a img span sub sup kbd u mark b i s"
).split(" ");
const CLEAN = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "src", "alt", "start", "align", "class", "data-lang", "data-display"],
  ADD_URI_SAFE_ATTR: ["start", "align", "data-lang", "data-display"], ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const PICTURE = /^data:image\/(?:png|jpeg|gif|webp);base64,[a-z0-9+/=]+$/i;
const SIMPLE = /&lt;(\/?(?:br|sub|sup|kbd|u|mark|b|i|em|strong|s|del) ?\/?)&gt;/gi; // written as HTML by many models
const MATH = [
  [/^\$\$([\s\S]+?)\$\$/, true], [/^\\\[([\s\S]+?)\\\]/, true], [/^\\\(([\s\S]+?)\\\)/, false],
  [/^\$(?![\s$])((?:\\[^]|[^$\\\n])+?)(?<!\s)\$(?!\d)/, false], // not "$5 and $6"
];

export const escape = (text) => text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

const math = {
  name: "math", level: "inline",
  start: (text) => text.match(/\$|\\[[(]/)?.index,
  tokenizer(text) {
    for (const [pattern, display] of MATH) {
      const found = text.match(pattern);
      if (found) return { type: "math", raw: found[0], text: found[1], display };
    }
    return undefined;
  },
  renderer: ({ text, display }) => `<span class="math" ${display ? 'data-display="yes"' : ""}>${escape(text)}</span>`,
};

const marked = new Marked({
  gfm: true,
  breaks: true, // lines of a poem or an address
  extensions: [math],
  renderer: {
    html: ({ text }) => escape(text).replace(SIMPLE, "<$1>"),
    heading({ tokens, depth }) {
      return `<h3 class="d${depth}">${this.parser.parseInline(tokens)}</h3>\n`;
    },
    code: ({ text, lang }) => `<pre><code data-lang="${escape((lang ?? "").match(/\S*/)[0])}">${escape(text)}</code></pre>\n`,
    image: ({ href, text }) => PICTURE.test(href)
      ? `<img src="${escape(href)}" alt="${escape(text)}">`
      : `<a href="${escape(href)}">${escape(text || href)} (picture, not loaded)</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer");
  node.setAttribute("target", "_blank");
  const href = node.getAttribute("href");
  if (href) node.setAttribute("title", href); // the text of a link may name another place
});

// Tokens of the blocks; a text that the parser refuses, such as 10,000 nested quotes, is one block.
function blocksOf(text) {
  try {
    const found = marked.lexer(text);
    return found.filter(({ type }) => type !== "space" && type !== "def").map((token) => ({ raw: token.raw, token }));
  } catch {
    return [{ raw: text, token: null }];
  }
}

function elementOf({ raw, token }) {
  const block = document.createElement("div");
  block.className = "block";
  try {
    if (!token) throw new Error("not parsed");
    block.append(DOMPurify.sanitize(marked.parser([token]), CLEAN));
  } catch {
    block.textContent = raw;
    block.classList.add("plain");
  }
  for (const code of block.querySelectorAll("pre > code")) frameCode(code);
  for (const table of block.querySelectorAll("table")) frameTable(table);
  for (const formula of block.querySelectorAll(".math")) drawMath(formula);
  return block;
}

// Draw `text` into `box`, and return the milliseconds that it took.
export function draw(box, text) {
  const before = performance.now(), blocks = blocksOf(text), old = box.blocks ?? [];
  let same = 0;
  while (same < old.length && same < blocks.length && old[same].raw === blocks[same].raw) same++;
  for (const { element } of old.slice(same)) element.remove();
  box.blocks = blocks.map((block, i) => (i < same ? old[i] : { raw: block.raw, element: elementOf(block) }));
  box.append(...box.blocks.slice(same).map(({ element }) => element));
  return performance.now() - before;
}

// ----------------------------------------------------------------------------- code, tables, math

const waiting = { highlight: [], temml: [] };
const loaded = {};

// A library is loaded when the first text needs it; what was drawn before is drawn again then.
function need(name, load, use, element) {
  if (loaded[name]) return use(element, loaded[name]);
  waiting[name].push(element);
  if (waiting[name].length > 1) return undefined;
  return load().then((library) => {
    loaded[name] = library;
    for (const one of waiting[name].splice(0)) use(one, library);
  }, () => waiting[name].splice(0)); // plain text stays
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = document.createElement("textarea"); // a page without HTTPS has no clipboard
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  return box.remove();
}

export function copyButton(text, label = "Copy") {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = label;
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

function frameCode(code) {
  const frame = document.createElement("div"), bar = document.createElement("div"), name = document.createElement("span");
  frame.className = "code";
  bar.className = "bar";
  name.textContent = code.dataset.lang || "text";
  bar.append(name, copyButton(() => code.textContent));
  const pre = code.parentElement;
  pre.tabIndex = 0; // it may scroll sideways
  pre.replaceWith(frame);
  frame.append(bar, pre);
  if (code.dataset.lang) need("highlight", async () => (await import("./vendor/highlight.min.js")).default, colour, code);
}

const MOST_COLOURED = 50_000; // characters; longer code stays plain

function colour(code, hljs) {
  const { lang } = code.dataset, text = code.textContent;
  if (!hljs.getLanguage(lang) || text.length > MOST_COLOURED) return;
  const { value } = hljs.highlight(text, { language: lang, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
}

function frameTable(table) {
  const frame = document.createElement("div");
  frame.className = "table";
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", "table");
  table.replaceWith(frame);
  frame.append(table);
}

// temml sets styles by the DOM, which the content policy allows; \href and the like stay off.
function loadTemml() {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("vendor/temml.min.js", import.meta.url).href;
    script.onload = () => resolve(globalThis.temml);
    script.onerror = reject;
    document.head.append(script);
  });
}

function typeset(element, temml) {
  const tex = element.textContent, display = element.dataset.display === "yes";
  try {
    temml.render(tex, element, { displayMode: display, throwOnError: true, trust: false });
    element.title = tex;
  } catch {
    element.textContent = tex; // shown as it was written
    element.classList.add("wrong");
  }
}

const drawMath = (element) => need("temml", loadTemml, typeset, element);

// ------------------------------------------------------------------------------------------- JSON

// JSON with line breaks and indents. Only white space outside of strings changes, so no number
// loses a digit. Null: the text is not an object or a list.
export function prettyJson(text) {
  try {
    if (!/^\s*[[{]/.test(text)) return null;
    JSON.parse(text);
  } catch {
    return null;
  }
  let depth = 0, out = "";
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [part] of text.matchAll(/"(?:\\.|[^"\\])*"|[{[]\s*[}\]]|[{}[\],:]|[^\s{}[\],:"]+/g)) {
    if (part === "{" || part === "[") (depth++, (out += part + line()));
    else if (part === "}" || part === "]") (depth--, (out += line() + part));
    else if (part === ",") out += part + line();
    else if (part === ":") out += ": ";
    else out += part.length > 1 && /^[{[]/.test(part) ? part[0] + part.at(-1) : part;
  }
  return out;
}
