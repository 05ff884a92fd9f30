// The engine view: steps on a time axis beside the roofline, drafts, cache blocks, running
// requests of this key. Polls /lens/api/engine; the server records steps only while it is polled.

import { html, nothing } from "./vendor/lit-html.js";
import { get } from "./api.js";
import { bytes, count, seconds } from "./format.js";
import { changed, fail, isRunning, state } from "./store.js";
import { term } from "./terms.js";

const KEEP = 1500; // steps kept in the page
const LANES = 6; // requests drawn on the time axis
const CELLS = 512; // blocks drawn one by one
const MARKED = 5000; // milliseconds that an evicted block stays marked
let timer = null, last = 0, failures = 0;

export function watch() {
  clearTimeout(timer);
  const soon = state.view === "engine" || state.branches.some(isRunning);
  timer = setTimeout(poll, soon ? 500 : 5000);
}

export async function poll() {
  clearTimeout(timer);
  try {
    const report = await get(`/lens/api/engine?after=${last}`);
    const steps = [...(last ? state.engine.steps : []), ...report.steps].slice(-KEEP);
    last = steps.at(-1)?.step ?? 0;
    report.pools.forEach((pool, i) => markEvicted(pool, state.engine?.pools[i] ?? pool));
    state.engine = { ...report, steps };
    failures = 0;
    if (state.view === "engine") changed();
  } catch (error) {
    last = 0; // read all steps again: a restarted engine counts from 1
    if (++failures === 3 && state.view === "engine") fail(error);
  }
  watch();
}

// pool.marks: block -> when its cached contents were dropped
function markEvicted(pool, before) {
  const now = performance.now();
  const fresh = Math.max(0, Math.min(pool.evictions - before.evictions, pool.evicted.length));
  pool.marks = new Map([...(before.marks ?? [])].filter(([, when]) => now - when < MARKED));
  for (const block of pool.evicted.slice(pool.evicted.length - fresh)) pool.marks.set(block, now);
}

const kindOf = (step) =>
  step.parts.some((p) => p.drafts) ? "draft" : step.parts.some((p) => p.kind === "prefill") ? "prefill" : step.parts.length ? "decode" : "others";

// ------------------------------------------------------------------------------------------ strips

// an entry of a legend: colour and name stay on one line
const mark = (kind, name = kind) => html`<span><i class=${kind}></i>${name}</span> `;
const kinds = (drafts) => [mark("prefill"), mark("decode"), mark("draft", drafts), mark("others", "other keys only")];

function timeline(steps) {
  if (!steps.length) return html`<p class="hint">No step yet. Generate something, and watch it here.</p>`;
  const shown = steps.slice(-160);
  const most = Math.max(...shown.map((s) => s.seconds));
  return html`<div class="timeline" role="img" aria-label="the last ${shown.length} steps">
    ${shown.map((s) => {
      const [own, drafts, won] = ["tokens", "drafts", "accepted"].map((name) => s.parts.reduce((n, p) => n + p[name], 0));
      const from = [...new Set(s.parts.map((p) => p.source).filter(Boolean))].join(", ");
      const title = `step ${s.step}: ${seconds(s.seconds)}, ${own} tokens${s.others ? ` + ${s.others} of other keys` : ""}${drafts ? `, ${won} of ${drafts} drafts accepted (${from})` : ""}`;
      return html`<i class=${kindOf(s)} title=${title} .style=${`height:${(8 + (92 * s.seconds) / most).toFixed(1)}%`}>
        ${drafts ? html`<b .style=${`height:${((100 * won) / drafts).toFixed(0)}%`}></b>` : nothing}</i>`;
    })}</div>
    <p class="legend">${kinds("with drafts (filled: accepted)")}${mark("queue", "queued")}${mark("preempted")}</p>${lanes(shown)}`;
}

// one lane per request: its time in the queue, then its steps
function lanes(steps) {
  const byRequest = new Map();
  for (const s of steps)
    for (const p of s.parts) {
      if (!byRequest.has(p.request)) byRequest.set(p.request, { arrival: p.arrival, pieces: [], preemptions: p.preemptions });
      const kind = p.drafts ? "draft" : p.kind, lane = byRequest.get(p.request), before = lane.pieces.at(-1);
      if (p.preemptions > lane.preemptions)
        lane.pieces.push({ from: before.to, to: s.at, kind: "preempted", title: `preempted; computes again from position ${p.start}` });
      lane.preemptions = p.preemptions;
      lane.pieces.push({ from: s.at, to: s.at + s.seconds, kind, title: `${p.tokens} tokens from position ${p.start}, ${seconds(s.seconds)}` });
    }
  const shown = [...byRequest].slice(-LANES);
  if (!shown.length) return nothing;
  const zero = Math.min(...shown.map(([, lane]) => lane.arrival));
  const end = Math.max(...shown.map(([, lane]) => lane.pieces.at(-1).to));
  const place = (from, to) => `left:${((100 * (from - zero)) / (end - zero)).toFixed(2)}%;width:${((100 * (to - from)) / (end - zero)).toFixed(2)}%`;
  return html`<ul class="lanes" aria-label="the last requests of this key">${shown.map(([id, { arrival, pieces, preemptions }]) => html`<li>
      <span>${id.slice(4, 12)}</span><div><i class="queue" title="queued ${seconds(pieces[0].from - arrival)}" .style=${place(arrival, pieces[0].from)}></i>
      ${pieces.slice(-400).map((p) => html`<i class=${p.kind} title=${p.title} .style=${place(p.from, p.to)}></i>`)}</div>
      <small>${preemptions ? `preempted ${preemptions}×` : `queued ${seconds(pieces[0].from - arrival)}`}</small></li>`)}</ul>`;
}

const NAMES = { o: "own", s: "shared", x: "of other keys", c: "cached", ".": "free" };

function strip(pool) {
  // runs of equal blocks, so that 4,096 blocks are a few elements
  const runs = [], used = pool.strip.replace(/\.+$/, "").length;
  const shown = pool.strip.slice(0, Math.max(64, Math.ceil(used * 1.5)));
  for (let block = 0; block < shown.length; block++) {
    const letter = shown[block], gone = pool.marks.has(block), run = runs.at(-1);
    if (shown.length > CELLS && run?.letter === letter && run.gone === gone) run.length++;
    else runs.push({ letter, gone, length: 1 });
  }
  const part = (kind, name) => mark(`b-${kind}`, `${name} ${count(pool[name])}`);
  return html`<div class="strip" role="img" aria-label="${pool.own} own, ${pool.shared} shared, ${pool.cached} cached, ${pool.free} free, ${pool.marks.size} just evicted blocks">
      ${runs.map(({ letter, gone, length }) => html`<i class="b-${letter === "." ? "free" : letter} ${gone ? "gone" : ""}" title="${length} ${NAMES[letter]}${gone ? ", just evicted" : ""}" .style=${`flex-grow:${length}`}></i>`)}</div>
    <p class="legend">${part("o", "own")}${part("s", "shared")}${mark("b-x", "other keys")}
      ${part("c", "cached")}${part("free", "free")}${mark("b-free gone", `evicted ${count(pool.evictions)}`)}· ${count(pool.total)} in all${shown.length < pool.total ? ` · the first ${count(shown.length)} are drawn` : ""}</p>`;
}

// round values between 0 and `most`
function ticks(most) {
  const least = most / 4, power = 10 ** Math.floor(Math.log10(least));
  const by = power * [1, 2, 5, 10].find((times) => times * power >= least);
  return Array.from({ length: Math.floor(most / by) + 1 }, (_, i) => i * by);
}

// the time of each step over the time of day, above the roofline
function plot(steps) {
  const shown = steps.slice(-400), floor = state.info.floor_seconds ?? 0;
  if (!shown.length) return nothing;
  const zero = shown[0].at, span = shown.at(-1).at - zero || 1;
  const most = 1.1 * Math.max(floor, ...shown.map((s) => s.seconds));
  const place = (side, share) => `${side}:${(100 * share).toFixed(2)}%`, up = (y) => place("bottom", y / most);
  return html`<div class="plot" id="plot" role="img" aria-label="the time of each of ${shown.length} steps">
      ${ticks(most).map((y) => html`<b .style=${up(y)}><span>${y ? seconds(y) : 0}</span></b>`)}
      ${ticks(span).map((x) => html`<u .style=${place("left", x / span)}>${Number(x.toPrecision(2))} s</u>`)}
      ${shown.map((s) => html`<i class=${kindOf(s)} title="step ${s.step}: ${seconds(s.seconds)}" .style=${`${place("left", (s.at - zero) / span)};${up(s.seconds)}`}></i>`)}
      ${floor ? html`<hr .style=${up(floor)} />` : nothing}</div>
    <p class="legend">${kinds("with drafts")}${floor ? mark("limit", "roofline") : nothing}</p>`;
}

function requests(report) {
  return html`<table class="plain"><caption class="quiet">running requests of this key</caption>
    <thead><tr><th scope="col">request</th><th scope="col">prompt</th><th scope="col">cached</th><th scope="col">written</th><th scope="col">since</th><th scope="col">state</th></tr></thead>
    <tbody>${report.requests.map((r) => html`<tr><td>${r.id.slice(0, 12)}</td><td>${count(r.prompt_tokens)}</td><td>${count(r.cached_tokens)}</td>
      <td>${count(r.output_tokens)}</td><td>${seconds(r.seconds)}</td><td>${r.waiting ? "queued" : r.preemptions ? `running, preempted ${r.preemptions}×` : "running"}</td></tr>`)}
    ${report.requests.length ? nothing : html`<tr><td colspan="6" class="hint">none now</td></tr>`}</tbody></table>`;
}

function proposers(steps) {
  const by = new Map();
  for (const s of steps)
    for (const p of s.parts) {
      if (!p.drafts) continue;
      const sum = by.get(p.source) ?? { drafts: 0, accepted: 0 };
      by.set(p.source, { drafts: sum.drafts + p.drafts, accepted: sum.accepted + p.accepted });
    }
  if (!by.size) return nothing;
  return html`<p class="facts">${[...by].map(([name, s]) => html`<span>${name || "drafts"}: ${count(s.accepted)} of ${count(s.drafts)} drafts accepted</span>`)}</p>`;
}

export function engineView() {
  const { info, engine } = state;
  if (!engine) return html`<section class="card"><p class="hint">reading the engine …</p></section>`;
  const decode = engine.steps.filter((s) => s.parts.length && s.parts.every((p) => p.kind === "decode" && !p.drafts));
  const median = [...decode].sort((a, b) => a.seconds - b.seconds)[decode.length >> 1]?.seconds;
  return html`<section class="card" aria-label="timeline"><h2>${term("Steps")} <small>each bar is one step of the engine</small></h2>${timeline(engine.steps)}${proposers(engine.steps)}</section>
    <section class="card" aria-label="roofline"><h2>${term("Beside the roofline")}</h2>${plot(engine.steps)}
      <p class="facts"><span>${bytes(info.weight_bytes)} of weights per step</span>
        <span>${info.floor_seconds ? html`estimated limit: ${seconds(info.floor_seconds)} per decode step on this machine` : "run `verbatim bench` once for this machine's limit"}</span>
        ${median ? html`<span>median decode step ${seconds(median)}${info.floor_seconds ? `, ${((100 * info.floor_seconds) / median).toFixed(0)} % of the limit's speed` : ""}</span>` : nothing}</p></section>
    <section class="card" aria-label="cache"><h2>${term("KV cache")} <small>blocks of ${info.block_size} tokens, ${bytes(info.kv_token_bytes)} per token</small></h2>
      ${engine.pools.map(strip)}
      <p class="facts"><span>${count(engine.prefix_hits)} of ${count(engine.prefix_queries)} prompt tokens came from the prefix cache</span><span>${count(engine.preemptions)} preemptions</span></p></section>
    <section class="card" aria-label="requests"><h2>Requests of this key <small>${engine.others ? `${engine.others} of other keys run too` : ""}</small></h2>${requests(engine)}</section>`;
}
