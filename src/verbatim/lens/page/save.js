// Save a run as one HTML file that opens without a server, and load it back.
//
// The file holds the page's own modules, its styles and the run as JSON. A small script turns the
// modules into blob URLs, in the order of their imports, and starts the page without a network.

import { call } from "./api.js";
import { rowOf } from "./run.js";
import { Row } from "./sampler.js";
import { checkShape } from "./shape.js";
import { changed, current, isRunning, keepIdsAbove, state } from "./store.js";
import { Vocab } from "./vocab.js";

const FORMAT = "verbatim-lens-2";
const MODULES = [
  "vendor/lit-html.js", "format.js", "numerics.js", "noise.js", "sampler.js", "store.js", "vocab.js", "api.js",
  "run.js", "tiles.js", "shape.js", "controls.js", "terms.js", "funnel.js", "inspector.js", "tree.js", "proof.js", "receipt.js", "engine.js", "save.js", "app.js",
];
const STEPS = 64; // steps whose rows are fetched when a run is saved

async function runData() {
  const branch = current();
  if (!state.offline)
    for (let i = 0; i < Math.min(branch.tokens.length, STEPS); i++)
      if (branch.tokens[i].record && !(branch.tokens[i].segment.params.num_beams > 1)) await rowOf(branch, i).catch(() => null);
  const segments = [], branches = [];
  const place = (segment) => {
    if (!segments.includes(segment)) segments.push(segment);
    return segments.indexOf(segment);
  };
  const tokens = [], places = new Map();
  for (const b of state.branches) {
    const { stop, error, tokens: own, ...plain } = b;
    const list = own.map((token) => {
      if (!places.has(token)) {
        places.set(token, tokens.length);
        tokens.push({ ...token, segment: place(token.segment) });
      }
      return places.get(token);
    });
    branches.push({ ...plain, status: isRunning(b) ? "stopped" : b.status, tokens: list });
  }
  const rows = [...state.rows].map(([key, row]) => [key, { ...row.data, row: undefined }]);
  const ids = new Set();
  for (const token of tokens) {
    ids.add(token.id);
    for (const c of token.record?.top ?? []) ids.add(c.id);
  }
  for (const b of branches) for (const id of b.promptIds) ids.add(id);
  for (const [, data] of rows) for (const [id] of [...data.top, ...data.cut]) ids.add(id);
  return {
    format: FORMAT, saved: new Date().toISOString(), info: state.info, branches, tokens, segments, rows,
    vocab: state.vocab.saved([...ids]), current: state.current, selected: state.selected, colour: state.colour,
  };
}

const inScript = (text) => text.replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028");

async function saveFile() {
  const data = await runData();
  const read = async (name) => (await call(`/lens/${name}`)).text();
  const modules = await Promise.all(MODULES.map(async (name) => [name, await read(name)]));
  const styles = await read("lens.css");
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data:">
<title>Verbatim Lens: a saved run</title><style>${styles}</style></head>
<body><div id="app"></div><div id="live" class="quiet" role="status" aria-live="polite"></div>
<script type="application/json" id="run">${inScript(JSON.stringify(data))}</script>
<script type="application/json" id="modules">${inScript(JSON.stringify(modules))}</script>
<script>(${start.toString()})()</script></body></html>`;
}

// runs in the saved file
function start() {
  const urls = {};
  for (const [name, source] of JSON.parse(document.getElementById("modules").textContent)) {
    const linked = source.replace(/from "\.\.?\/([^"]+)"/g, (_, other) => `from "${urls[other] ?? other}"`);
    urls[name] = URL.createObjectURL(new Blob([linked], { type: "text/javascript" }));
  }
  import(urls["app.js"]);
}

export async function download() {
  const text = await saveFile();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  link.download = `verbatim-run-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// the run in a file's text; throws a sentence for people
export function parseRun(text) {
  let data;
  try {
    const found = text.match(/<script type="application\/json" id="run">([\s\S]*?)<\/script>/);
    data = JSON.parse(found ? found[1] : text);
  } catch {
    throw new Error("This file holds no run of the Lens.");
  }
  if (data?.format !== FORMAT) throw new Error("This file holds no run that this version of the Lens can read.");
  checkShape(data);
  return data;
}

export function restore(data, { offline }) {
  const { segments } = data;
  const tokens = data.tokens.map((token) => ({ ...token, segment: segments[token.segment] }));
  state.rows.clear();
  for (const [key, row] of data.rows) state.rows.set(key, new Row(row));
  state.branches = data.branches.map((b) => ({ ...b, tokens: b.tokens.map((i) => tokens[i]) }));
  keepIdsAbove([...segments, ...state.branches].reduce((most, { id }) => Math.max(most, id), 0));
  Object.assign(state, {
    current: data.current, selected: data.selected, colour: data.colour, other: null, proof: null, trouble: null,
    whatIf: {}, turns: [], offline,
  });
  if (offline) {
    // a run of an older version says nothing of sliders
    const here = state.info?.parameters, rules = Object.entries(data.info.parameters);
    const parameters = Object.fromEntries(rules.map(([name, rule]) => [name, { slider: here?.[name]?.slider, ...rule }]));
    Object.assign(state, { info: { ...data.info, parameters }, vocab: Vocab.fromSaved(data.vocab) });
  }
  changed();
}
