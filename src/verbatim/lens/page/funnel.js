// The sampler of one step, drawn stage by stage: bars of what is left and of what was cut, then
// the noise and the draw.

import { html, nothing } from "./vendor/lit-html.js";
import { count, number, percent } from "./format.js";
import { DEFAULTS, FILTERS, sample } from "./sampler.js";
import { exp } from "./numerics.js";
import { state } from "./store.js";

// titles of the stages that are no parameter, or better known by another name
export const TITLES = {
  ...Object.fromEntries(FILTERS.map((name) => [name, name.replaceAll("_", "-")])),
  raw: "softmax of the logits", structure: "grammar", min_tokens: "minimum length", dry_multiplier: "DRY",
  no_repeat_ngram: "no repeated n-gram", xtc_probability: "XTC",
};
const SEGMENTS = 24;

export const settingsOf = (params) =>
  Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, params[name] ?? value]));

// the model's own probability of a candidate: bit for bit the API's logprob
export const logprobOf = (row, logit) => logit - row.data.peak - row.data.log_total;

function bar(parts, left, drawn) {
  // parts: [{id, share}] in order; `left`: the share of the whole that is left
  const wide = parts.filter((part) => part.share > 0.004), rest = left - wide.reduce((sum, part) => sum + part.share, 0);
  return html`<div class="bar" aria-hidden="true">
    ${wide.map(
      ({ id, share }) => html`<i class=${id === drawn ? "drawn" : ""} data-id=${id} .style=${`flex-basis:${(100 * share).toFixed(3)}%`}
        title="${state.vocab.show(id)} ${percent(share)}">${share > 0.045 ? state.vocab.show(id) : ""}</i>`,
    )}
    <i class="rest" .style=${`flex-basis:${(100 * Math.max(0, rest)).toFixed(3)}%`}></i>
    ${left < 0.99995 ? html`<i class="cut" .style=${`flex-basis:${(100 * (1 - left)).toFixed(3)}%`}></i>` : nothing}
  </div>`;
}

function stage(name, { left, removed, mass, exact = true, note = "" }, parts, drawn, setting) {
  const share = exact || mass >= 0.99995 ? percent(mass) : `≈ ${percent(mass)}`;
  return html`<li class="stage" data-stage=${name}>
    <div class="head"><b>${TITLES[name] ?? name.replaceAll("_", " ")}</b> <span class="setting">${setting}</span>
      <span class="numbers"><span class="left">${count(left)}</span> ${left === 1 ? "id" : "ids"}, <span class="mass">${share}</span></span></div>
    ${bar(parts, mass, drawn)}
    <div class="note">${removed ? html`cuts ${count(removed)} ${removed === 1 ? "id" : "ids"}${note ? ";" : ""}` : nothing} ${note}</div>
  </li>`;
}

// the most likely ids before any stage
function mostLikely(row) {
  const { top, cut } = row.data;
  const all = [...top, ...cut].sort((a, b) => b[1] - a[1]).slice(0, SEGMENTS);
  return all.map(([id, raw]) => ({ id, share: exp(Math.min(0, logprobOf(row, raw))) }));
}

// all stages: those before the temperature as the server ran them, the others as drawn here
export function stages(row, result, settings, params) {
  const { data } = row;
  const all = (row.likely ??= mostLikely(row));
  const out = [stage("raw", { left: data.vocab, removed: 0, mass: 1 }, all, result.token, `entropy ${number(data.entropy, 2)} nats`)];
  for (const s of data.stages) {
    const gone = data.cut.filter(([, , by]) => by === s.name).slice(0, 4);
    const note = gone.length
      ? html`first: ${gone.map(([id]) => html`<q>${state.vocab.show(id)}</q> `)}`
      : s.changed ? html`changes ${count(s.changed)} ${s.changed === 1 ? "logit" : "logits"}` : "";
    const parts = s.top.map(([id, share]) => ({ id, share: share * s.mass }));
    out.push(stage(s.name, { ...s, note }, parts, result.token, shown(params[s.name])));
  }
  if (result.greedy) {
    out.push(html`<li class="stage" data-stage="greedy"><div class="head"><b>temperature 0</b> <span class="setting">the most likely id</span>
      <span class="numbers"><span class="left">1</span> id</span></div>${bar([{ id: result.token, share: 1 }], 1, result.token)}</li>`);
    return html`<ol class="stages">${out}</ol>`;
  }
  let before = [];
  for (const s of result.stages) {
    const cut = s.removed ? before.find((i, place) => i !== s.order[place]) : undefined;
    const { id, share } = result.share(cut);
    const note = cut === undefined ? "" : html`first: <q>${state.vocab.show(id)}</q> ${percent(share)}`;
    const parts = Array.from(s.order.subarray(0, SEGMENTS), result.share);
    out.push(stage(s.name, { ...s, note }, parts, result.token, shown(settings[s.name])));
    before = s.order;
  }
  return html`<ol class="stages">${out}</ol>`;
}

const shown = (value) =>
  value === undefined || value === null ? "" : typeof value === "object" ? "set" : String(value).slice(0, 24);

// the draw: final probability, noise, score of the leading candidates
export function draw(result) {
  if (result.greedy) return html`<p class="hint">Temperature 0 takes the largest logit. No noise is made.</p>`;
  const rows = result.leaders, low = rows.at(-1).score, high = rows[0].score;
  const width = (score) => 8 + (92 * (score - low)) / Math.max(high - low, 1e-9);
  return html`<p class="hint">score = logit distance ÷ temperature + noise; the largest wins${
      result.lead === null ? "" : html`, here by ${number(result.lead, 2)}`}. The noise is a function of seed, position and id.</p>
    <table class="draw">
    <thead><tr><th scope="col">token</th><th scope="col">left with</th><th scope="col">noise</th><th scope="col">score</th><td></td></tr></thead>
    <tbody>
      ${Array.from({ length: 6 }, (_, i) => rows[i]).map((c, i) => c ? html`<tr class=${i ? "" : "winner"}>
        <td><q>${state.vocab.show(c.id)}</q></td><td>${percent(c.probability)}</td>
        <td>${c.noise >= 0 ? "+" : ""}${number(c.noise, 2)}</td><td>${number(c.score, 2)}</td>
        <td class="meter"><i .style=${`width:${width(c.score).toFixed(1)}%`}></i></td></tr>` : html`<tr><td></td></tr>`)}
    </tbody></table>`;
}

// the same logits and noise under five samplers; `wantRest` requests the whole row
export function sideBySide(row, settings, wantRest) {
  const t = settings.temperature || 1;
  const kinds = {
    greedy: { temperature: 0 },
    temperature: { temperature: t },
    "top-k": { temperature: t, top_k: settings.top_k || 40 },
    "top-p": { temperature: t, top_p: settings.top_p < 1 ? settings.top_p : 0.9 },
    "min-p": { temperature: t, min_p: settings.min_p || 0.05 },
  };
  return html`<div class="five">
    ${Object.entries(kinds).map(([name, wanted]) => {
      const result = sample(row, wanted, row.usedKey), open = result.undecided;
      if (open) wantRest();
      const setting = Object.entries(wanted).map(([k, v]) => `${k === "temperature" ? "T" : ""}${v}`).join(" · ");
      return html`<figure data-sampler=${name}>
        <figcaption><b>${name}</b> <span class="setting">${setting}</span></figcaption>
        ${result.kept.map((c) => html`<div class="mini ${c.id === result.token ? "drawn" : ""}">
          <i .style=${`width:${(100 * c.probability).toFixed(2)}%`}></i><span>${state.vocab.show(c.id)}</span></div>`)}
        <div class="out" data-token=${open ? "" : result.token} title=${open ?? ""}>${open ? "? left" : `${count(result.left)} left`}<br />→ ${
          open ? (state.offline ? "cannot say" : "…") : html`<q>${state.vocab.show(result.token)}</q>`}</div>
      </figure>`;
    })}
  </div>`;
}
