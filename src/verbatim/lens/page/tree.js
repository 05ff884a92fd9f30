// Branches: the tree of a run, two of them side by side, votes, and what the prefix cache saved.

import { html, nothing } from "./vendor/lit-html.js";
import { count, seconds } from "./format.js";
import { branchOf, changed, current, show, state } from "./store.js";

const textOf = (tokens) => state.vocab.text(tokens.map((t) => t.id));

function line(branch, depth) {
  const text = textOf(branch.tokens.slice(branch.forkAt)).replace(/\s+/g, " ");
  const usage = branch.usage;
  const cached = usage?.prompt_tokens_details.cached_tokens;
  const on = branch.id === state.current, twin = branch.id === state.other;
  return html`<li class="branch ${on ? "on" : ""}" .style=${`margin-inline-start:${depth * 1.1}rem`} data-branch=${branch.id}>
    <button class="name" aria-current=${on} @click=${() => show(branch.id, branch.forkAt || -1)}>
      <b>${branch.label}</b>${branch.parent ? html` <small>at token ${branch.forkAt + 1}</small>` : nothing}
      <span class="text">${text.slice(0, 90) || "…"}</span></button>
    <small>${branch.status === "done" ? branch.finish : branch.status}${usage
        ? html` · <span class="cached">${cached}</span> cached + <span class="computed">${usage.prompt_tokens - cached}</span> computed` : nothing}</small>
    ${on ? nothing : html`<button class="small" aria-pressed=${twin} @click=${() => { state.other = twin ? null : branch.id; changed(); }}>${twin ? "comparing" : "compare"}</button>`}
  </li>`;
}

function below(parent, depth = 0) {
  return state.branches.filter((b) => b.parent === parent).map((b) => [line(b, depth), below(b.id, depth + 1)]);
}

// how many answers are equal, for n > 1
function votes() {
  const answers = state.branches.filter((b) => b.parent === null && b.status === "done");
  if (answers.length < 2) return nothing;
  const tally = new Map();
  for (const text of answers.map((branch) => textOf(branch.tokens).trim())) tally.set(text, (tally.get(text) ?? 0) + 1);
  const [text, most] = [...tally].sort((a, b) => b[1] - a[1])[0];
  return html`<p class="hint">Vote: ${most} of ${answers.length} answers are “${text.slice(0, 60)}”, ${tally.size} different ones.</p>`;
}

function compared() {
  const left = current(), right = branchOf(state.other);
  if (!left || !right) return nothing;
  let same = 0;
  while (same < Math.min(left.tokens.length, right.tokens.length) && left.tokens[same].id === right.tokens[same].id) same++;
  const column = (branch) => html`<div class="column"><h3>${branch.label}</h3>
    <p class="prose"><span class="shared">${textOf(branch.tokens.slice(0, same))}</span><mark>${textOf(branch.tokens.slice(same))}</mark></p>
    <small>${mean(branch)}</small></div>`;
  return html`<div class="two">${column(left)}${column(right)}</div>
    <p class="hint">${same === left.tokens.length && same === right.tokens.length ? "equal, token by token" : html`equal for ${count(same)} tokens`}</p>`;
}

function mean(branch) {
  const known = branch.tokens.filter((t) => t.record);
  if (!known.length) return "";
  const sum = known.reduce((s, t) => s + t.record.logprob, 0);
  return `${branch.tokens.length} tokens, mean log-probability ${(sum / known.length).toFixed(3)}`;
}

export function tree() {
  if (!state.branches.length) return nothing;
  return html`<section class="card" aria-label="branches"><h2>Branches</h2>
    <ul class="tree">${below(null)}</ul>${votes()}${compared()}</section>`;
}

export function facts(branch) {
  const usage = branch.usage, wait = branch.firstToken - branch.started;
  const made = branch.tokens.length;
  const details = usage?.completion_tokens_details;
  return html`<p class="facts">
    <span>${made} tokens</span>
    ${branch.firstToken ? html`<span>first after ${seconds(wait / 1000)}</span>` : nothing}
    ${usage ? html`<span>${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached</span>` : nothing}
    ${details?.accepted_prediction_tokens + details?.rejected_prediction_tokens
      ? html`<span>drafts: ${details.accepted_prediction_tokens} accepted, ${details.rejected_prediction_tokens} rejected</span>` : nothing}
    <span>${branch.status === "done" ? `ended by ${branch.finish}` : branch.status}</span>
    <span>seed ${branch.tokens.at(-1)?.segment.params.seed ?? "–"}</span></p>
    ${branch.loop ? html`<p class="warn">The output repeats its last ${branch.loop} tokens.</p>` : nothing}
    ${branch.warnings.map((warning) => html`<p class="warn">${warning}</p>`)}`;
}
