// The chosen step: the loop, its candidates, sliders that redraw with the same noise, the funnel.

import { html, nothing } from "./vendor/lit-html.js";
import { count, number, percent, seconds } from "./format.js";
import { draw, logprobOf, settingsOf, sideBySide, stages, TITLES } from "./funnel.js";
import { keyFromHex, noiseKey, noiseOf } from "./noise.js";
import { branchFrom, branchWith, extend, fromLeftToRight, rowOf, rowKey } from "./run.js";
import { FILTERS, sample } from "./sampler.js";
import { changed, current, isRunning, select, state } from "./store.js";
import { play } from "./tiles.js";
import { term } from "./terms.js";

// Stages before the temperature need the whole history: the server runs them, the page draws.
const PENALTIES = { repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0 };
const ownOf = (params) => ({ ...settingsOf(params), ...Object.fromEntries(Object.entries(PENALTIES).map(([name, off]) => [name, params[name] ?? off])) });
let listed = 12;
const pending = new Set(); // rows on their way; one that was refused stays here
const refused = new Map(); // row -> the server's words

function whatIf(name, value) {
  const { params } = current().tokens[state.selected].segment;
  const own = name === "seed" ? params.seed : ownOf(params)[name];
  if (value === own || Number.isNaN(value)) delete state.whatIf[name];
  else state.whatIf[name] = value;
  changed("step");
}

// a text that is no seed leaves the seed as it is, and says what one is
function whatIfSeed(box) {
  const text = box.value.trim(), seed = Number(text), isSeed = /^\d+$/.test(text) && Number.isSafeInteger(seed);
  box.setCustomValidity(text && !isSeed ? "a whole number from 0 to 2⁵³ − 1" : "");
  box.reportValidity();
  if (isSeed || !text) whatIf("seed", isSeed ? seed : NaN);
}

const isBeam = (token) => (token.segment.params.num_beams ?? 1) > 1;

// Request a row once; the view redraws when it is there.
function want(branch, index, rest, changes) {
  const key = `${rowKey(branch.tokens[index], index, changes)} ${rest}`;
  if (pending.has(key) || state.offline) return;
  pending.add(key);
  rowOf(branch, index, { rest, changes }).then(
    () => pending.delete(key),
    (error) => {
      refused.set(rowKey(branch.tokens[index], index), error.message);
      if (![0, 429, 503].includes(error.status)) return;
      setTimeout(() => pending.delete(key) && changed(), 1000 * (error.retry ?? 1)); // busy or gone: again
    },
  ).finally(changed);
}

// {row, settings, result, wantRest}: the step under the sliders; the last requests the whole row
function computeStep(branch, index) {
  const token = branch.tokens[index];
  const { seed, ...changes } = state.whatIf;
  const earlier = Object.fromEntries(Object.entries(changes).filter(([name]) => name in PENALTIES));
  const asked = state.rows.get(rowKey(token, index, earlier));
  if (!asked && Object.keys(earlier).length) want(branch, index, false, earlier);
  const row = asked ?? state.rows.get(rowKey(token, index));
  if (!row) {
    // While the text grows, its end is followed with the stream's own numbers only.
    const follows = isRunning(branch) && index === branch.tokens.length - 1;
    if (!follows && !isBeam(token)) want(branch, index, false, {});
    return null;
  }
  const settings = { ...ownOf(token.segment.params), ...changes };
  row.usedKey = seed === undefined ? row.key : noiseKey(BigInt(seed), token.draw ?? 0);
  const result = sample(row, settings, row.usedKey);
  const wantRest = () => asked && want(branch, index, true, earlier);
  if (result.undecided) wantRest();
  if (!asked) result.undecided = state.offline ? "a penalty needs the server" : "the server applies the penalty";
  return { row, settings, result, wantRest };
}

// the largest scores among the candidates that the stream brings
function leadersOf({ id, record, forced }) {
  if (typeof record?.score !== "number" || record.temperature === 0) return [];
  const known = record.top.filter((c) => c.score !== null);
  const missing = !forced && !known.some((c) => c.id === id);
  if (missing) known.push({ id, score: record.score, noise: noiseOf(keyFromHex(record.key), record.position + 2 ** 32 * (record.denoising_step ?? 0), id) });
  return known.sort((a, b) => b.score - a.score || a.id - b.id);
}

function loop(branch, index, step) {
  const token = branch.tokens[index], { record } = token;
  const length = branch.promptIds.length + index;
  const tail = [...branch.promptIds.slice(-6), ...branch.tokens.slice(Math.max(0, index - 6), index).map((t) => t.id)].slice(-6);
  const row = step?.row, known = record?.top ?? row?.data.top.map(([id, logit]) => ({ id, logit, logprob: logprobOf(row, logit), noise: null }));
  // the five most likely, and the drawn one where it is not among them
  const five = known?.slice(0, 5) ?? [], own = known?.find((c) => c.id === token.id) ?? (record && { ...record, id: token.id });
  const top = !own || five.some((c) => c.id === token.id) ? five : [...five, own];
  const low = Math.min(...top.map((c) => c.logit)) - 1, high = Math.max(...top.map((c) => c.logit));
  const drawn = (step && !step.result.undecided ? step.result.leaders ?? [] : leadersOf(token)).slice(0, 5), [least, most] = [Math.min, Math.max].map((of) => of(...drawn.map((c) => c.score)));
  const mini = (share, id, text) => html`<div class="mini ${id === token.id ? "drawn" : ""}"><i .style=${`width:${(100 * share).toFixed(1)}%`}></i><span>${text}</span></div>`;
  return html`<ol class="loop" aria-label="the loop of this token">
    <li><h3>${term("context")}</h3><div class="tail">${tail.map((id) => html`<span>${state.vocab.show(id)}</span>`)}</div><small>${count(length)} tokens</small></li>
    <li><h3>${term("logits")}</h3>${top.map((c) => mini((c.logit - low) / (high - low || 1), c.id, number(c.logit, 1)))}<small>${record ? `${count(record.vocab)} of them` : ""}</small></li>
    <li><h3>${term("softmax")}</h3>${top.map((c) => mini(Math.exp(c.logprob), c.id, percent(Math.exp(c.logprob))))}<small>${record ? `entropy ${number(record.entropy, 2)} nats` : ""}</small></li>
    <li><h3>${term("sample")}</h3>${drawn.map((c) => mini(0.08 + (0.92 * (c.score - least)) / (most - least || 1), c.id, `${c.noise >= 0 ? "+" : ""}${number(c.noise, 1)}`))}
      <small>${record?.temperature === 0 ? "greedy: the largest" : "score with noise"}</small></li>
    <li class="append"><h3>${term("append")}</h3><div class="big">${state.vocab.show(token.id)}</div><small>id ${token.id}, position ${record?.position ?? length}</small></li>
  </ol>`;
}

const isDenoised = (token) => token?.record?.denoising_step !== undefined;

function blockOf({ tokens }, { record, segment }) {
  const blocks = state.info.diffusion, length = segment.params.block_length ?? (blocks.block || tokens.length);
  return Math.floor((record.position - blocks.behind_prompt * record.prompt_len) / length);
}

// The last request of a branch: tokens, passes that decided one, seconds
function pace(branch) {
  const own = branch.tokens.filter((t) => t.segment === branch.tokens.at(-1).segment);
  const passes = new Set(own.map((t, i) => (isDenoised(t) ? `${blockOf(branch, t)} ${t.record.denoising_step}` : i))).size;
  return html`<tr><th scope="row">${branch.label}</th><td>${count(own.length)} tokens</td><td>${count(passes)} passes</td><td>${branch.ended ? seconds((branch.ended - branch.started) / 1000) : "…"}</td></tr>`;
}

// A token's block of a diffusion model: per step what was decided, with its confidence; beside it
// the same prompt from left to right
function canvas(branch, index) {
  const other = state.branches.find((b) => b.id === state.other);
  const shown = [branch, other].filter((b) => b?.tokens.length);
  if (!shown.some((b) => isDenoised(b.tokens[0]))) return nothing;
  const twin = shown.length > 1 ? nothing : html`<button type="button" ?disabled=${state.offline || isRunning(branch)} @click=${() => fromLeftToRight(branch)}>from left to right</button>`;
  return html`<section class="card"><h2>${term("The canvas")}</h2>${isDenoised(branch.tokens[index]) ? filled(branch, index) : nothing}
    <table class="pace"><tbody>${shown.map(pace)}</tbody></table>${twin}</section>`;
}

function filled(branch, index) {
  const block = blockOf(branch, branch.tokens[index]);
  const cells = branch.tokens.filter((t) => isDenoised(t) && blockOf(branch, t) === block);
  const cell = ({ id, record: r }, step) => r.denoising_step > step
    ? html`<td class="quiet">▒</td>`
    : html`<td class=${r.denoising_step === step ? "drawn" : ""} title=${percent(Math.exp(r.confidence))}><q>${state.vocab.show(id)}</q></td>`;
  const steps = [...new Set(cells.map((t) => t.record.denoising_step))].sort((a, b) => a - b);
  return html`<table class="canvas"><tbody>${steps.map((step) => html`<tr><th scope="row">${step + 1}</th>${cells.map((t) => cell(t, step))}</tr>`)}</tbody></table>`;
}

// the most likely candidates; under a grammar that cuts all of them also the first it allows
function listedOf(known) {
  const ranked = known.map((c, rank) => [c, rank]), first = ranked.slice(0, listed), isOpen = ([c]) => !c.by;
  return first.some(isOpen) ? first : [...first, ...ranked.slice(listed).filter(isOpen).slice(0, 5)];
}

function candidates(branch, index, step) {
  const token = branch.tokens[index];
  const known = step
    ? [...step.row.data.top.map(([id, raw]) => ({ id, logprob: logprobOf(step.row, raw) })),
       ...step.row.data.cut.map(([id, raw, by]) => ({ id, by, logprob: logprobOf(step.row, raw) }))].sort((a, b) => b.logprob - a.logprob)
    : (token.record?.top ?? []);
  return html`<table class="candidates"><caption class="quiet">The most likely tokens; a button continues from one of them</caption>
    <tbody>${listedOf(known).map(([c, rank]) => {
      const p = Math.exp(c.logprob), taken = c.id === token.id, by = c.by ?? (c.processed === null ? "cut" : "");
      return html`<tr class=${taken ? "drawn" : ""} data-id=${c.id}>
        <td class="rank">${rank + 1}</td>
        <td class="word"><q>${state.vocab.show(c.id)}</q><small>${c.id}${state.bytes ? ` · ${state.vocab.hex(c.id)}` : ""}</small></td>
        <td class="meter"><i .style=${`width:${(100 * p).toFixed(2)}%`}></i></td>
        <td class="p" data-logprob=${c.logprob}>${percent(p)}</td>
        <td>${by ? html`<span class="tag">${TITLES[by] ?? by}</span>` : taken ? html`<span class="tag drawn">${token.forced ? "chosen" : "drawn"}</span>` : state.offline ? nothing
          : html`<button class="small" aria-label="branch from ${state.vocab.show(c.id)}" @click=${() => branchFrom(branch, index, c.id)}>branch</button>`}</td></tr>`;
    })}</tbody></table>
    <p class="row">${known.length > listed ? html`<button class="link" @click=${() => { listed += 52; changed(); }}>Show more of ${known.length}</button>` : nothing}
      ${listed > 12 ? html`<button class="link" @click=${() => { listed = 12; changed(); }}>Show fewer</button>` : nothing}</p>`;
}

function sliders(branch, index, step) {
  const { settings, result } = step, token = branch.tokens[index];
  const changes = Object.keys(state.whatIf).length;
  const fork = () => branchWith(branch, index, { ...state.whatIf });
  const outcome = result.undecided
    ? html`<span class="tag">${state.offline ? "cannot say: " : "one moment: "}${result.undecided}</span>`
    : result.token === token.id
      ? html`still <q>${state.vocab.show(result.token)}</q>`
      : html`would draw <q class="other">${state.vocab.show(result.token)}</q>`;
  return html`<section class="card" aria-label="what if">
    <h2>${term("What if?")} <small>the same logits, the same noise</small></h2>
    <div class="sliders">
      ${["temperature", ...FILTERS, ...(state.offline ? [] : Object.keys(PENALTIES))].map((name) => {
        const [low, high, by] = state.info.parameters[name].slider;
        return html`<label class=${name in state.whatIf ? "moved" : ""}><span>${name} <output>${settings[name]}</output></span>
          <input type="range" data-what=${name} aria-label=${name} min=${low} max=${high} step=${by} .value=${String(settings[name])}
            @input=${(e) => whatIf(name, Number(e.target.value))} /></label>`;
      })}
      <label class=${"seed" in state.whatIf ? "moved" : ""}><span>seed</span>
        <input data-what="seed" inputmode="numeric" .value=${String(state.whatIf.seed ?? token.segment.params.seed ?? "")}
          @change=${(e) => whatIfSeed(e.target)} /></label>
    </div>
    <p class="row"><strong id="outcome" role="status" data-token=${result.undecided ? "" : result.token}>${outcome}</strong>
      ${changes && !state.offline ? html`<button @click=${fork}>Branch here with these settings</button>
        <button class="link" @click=${() => { state.whatIf = {}; changed("step"); }}>Reset</button>` : nothing}</p>
    ${!changes && !result.undecided && !token.forced && token.record?.token !== result.token
      ? html`<p class="alarm">The page draws ${state.vocab.quoted(result.token)} where the server drew ${state.vocab.quoted(token.id)}. Please report this.</p>` : nothing}
  </section>`;
}

// the step under the sliders, computed once per redraw for both columns
let step = null;

export function loopView() {
  const branch = current();
  step = null;
  if (!branch?.tokens.length) return nothing;
  const index = branch.tokens[state.selected] ? state.selected : -1; // a branch may not be there yet
  const running = isRunning(branch);
  step = index < 0 ? null : computeStep(branch, index);
  return html`<section class="card" aria-label="the loop"><h2>The loop <small>context → logits → softmax → sample → append</small></h2>
    <div class="steps row" role="toolbar" aria-label="steps">
      <button class="small" ?disabled=${index < 1} @click=${() => select(index - 1)} aria-label="previous token">◀</button>
      <button class="small" @click=${() => play(!state.playing)} aria-pressed=${state.playing}>${state.playing ? "Pause" : "Play"}</button>
      <button class="small" ?disabled=${(state.offline || running) && index >= branch.tokens.length - 1} aria-label="next token" @click=${forward}>▶</button>
      <span class="hint">${index < 0 ? "choose a token, or step with ▶" : html`token ${index + 1} of ${branch.tokens.length}${running ? " so far" : ""}`}</span>
    </div>
    ${index < 0 ? nothing : loop(branch, index, step)}
    ${branch.tokens[index]?.forced ? html`<p class="hint">You chose this token; the sampler did not draw it.</p>` : nothing}</section>`;
}

// the next token; at the end, one more is generated
function forward() {
  const branch = current();
  if (state.selected < branch.tokens.length - 1) return select(state.selected + 1);
  return extend().then(() => select(branch.tokens.length - 1));
}

export function inspector() {
  const branch = current(), index = state.selected;
  if (!branch?.tokens[index]) return nothing;
  return html`${canvas(branch, index)}<section class="card" aria-label="candidates"><h2>${term("Candidates")} <small>the model's own distribution</small></h2>${candidates(branch, index, step)}</section>
    ${step
      ? html`${sliders(branch, index, step)}
        <section class="card funnel" aria-label="the funnel"><h2>${term("The funnel")} <small>what each stage leaves</small></h2>
          ${stages(step.row, step.result, step.settings, { ...branch.tokens[index].segment.params, ...state.whatIf })}
          <h3>${term("The draw")}</h3>${draw(step.result)}</section>`
      : html`<section class="card"><p class="hint">${whyNot(branch, index)}</p></section>`}`;
}

function whyNot(branch, index) {
  const token = branch.tokens[index];
  if (isBeam(token)) return "Beam search keeps the likeliest sequences. It draws no token, so there is no noise to show.";
  if (state.offline) return "This step was not opened before the run was saved.";
  if (isRunning(branch)) return "The funnel opens when the text ends, or on any earlier token.";
  return refused.get(rowKey(token, index)) ?? "reading the logits …";
}

export function fiveSamplers() {
  if (!step || state.selected < 0) return nothing;
  return html`<section class="card" aria-label="side by side"><h2>${term("Side by side")} <small>five samplers, the same logits, the same noise</small></h2>${sideBySide(step.row, step.settings, step.wantRest)}</section>`;
}
