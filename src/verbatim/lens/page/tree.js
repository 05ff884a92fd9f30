// Branches: the tree of a run, two of them side by side, votes, and what the prefix cache saved.

import { html, nothing } from "./vendor/lit-html.js";
import { count, seconds } from "./format.js";
import { drawRejected } from "./run.js";
import { branchOf, changed, current, show, state } from "./store.js";
import { term } from "./terms.js";

const textOf = (tokens) => state.vocab.text(tokens.map((t) => t.id));
const excerpt = (tokens) => textOf(tokens).replace(/\s+/g, " ").slice(0, 90) || "…";
// NaN: the numbers of a token are not known
const logprobOf = (tokens) => tokens.reduce((sum, t) => sum + t.record?.logprob, 0);
const total = (tokens) => (!tokens.length || Number.isNaN(logprobOf(tokens)) ? nothing : html` · log-probability ${logprobOf(tokens).toFixed(3)}`);
const STATUS = { error: "broken off" };
const indent = (depth) => `margin-left:${depth * 1.1}rem`;

// `from`: the first token that the lines above do not show
function line(branch, depth, from = branch.forkAt) {
  const { usage } = branch;
  const cached = usage?.prompt_tokens_details.cached_tokens;
  const on = branch.id === state.current, twin = branch.id === state.other;
  return html`<li class="branch ${on ? "on" : ""} ${branch.rejected ? "rejected" : ""}" .style=${indent(depth)} aria-level=${depth + 1} data-branch=${branch.id}>
    <button class="name" aria-current=${on} @click=${() => show(branch.id, from || -1)}>
      <b>${branch.label}</b>${from ? html` <small>${branch.tokens[from] ? `at token ${from + 1}` : "ends here"}</small>` : nothing}
      <span class="text" dir="auto">${excerpt(branch.tokens.slice(from))}</span></button>
    <small>${branch.status === "done" ? branch.finish : STATUS[branch.status] ?? branch.status}${total(branch.tokens)}${branch.score ? ` · score ${branch.score.toFixed(3)}` : nothing}${usage
        ? html` · <span class="cached">${cached}</span> cached + <span class="computed">${usage.prompt_tokens - cached}</span> computed` : nothing}</small>
    ${on ? nothing : html`<button class="small" aria-pressed=${twin} @click=${() => { state.other = twin ? null : branch.id; changed(); }}>${twin ? "comparing" : "compare"}</button>`}
  </li>`;
}

const below = (parent, depth) =>
  state.branches.filter((b) => b.parent === parent).map((b) => [line(b, depth), below(b.id, depth + 1)]);

// Answers of one request that agree in their first `from` tokens: what they share is drawn once,
// then each fork at its token.
function forks(answers, from = 0, depth = 0) {
  const leaf = (b) => [line(b, depth, from), below(b.id, depth + 1)];
  if (answers.length === 1) return leaf(answers[0]);
  const [{ tokens }] = answers;
  let to = from;
  while (tokens[to] && answers.every((b) => b.tokens[to]?.id === tokens[to].id)) to++;
  if (to > from)
    return [html`<li class="branch" .style=${indent(depth)} aria-level=${depth + 1}>
      <span class="name"><b>${to > from + 1 ? `tokens ${from + 1} to ${to}` : `token ${to}`}</b><span class="text" dir="auto">${excerpt(tokens.slice(from, to))}</span></span>
      <small>shared by ${answers.length} answers${total(tokens.slice(0, to))}</small></li>`, forks(answers, to, depth + 1)];
  return [...Map.groupBy(answers, (b) => b.tokens[from]?.id)].map(([id, group]) => (id === undefined ? group.map(leaf) : forks(group, from, depth)));
}

// how many answers are equal, for n > 1
function votes() {
  const answers = state.branches.filter((b) => b.parent === null && b.status === "done" && !b.rejected);
  if (answers.length < 2) return nothing;
  const tally = new Map();
  for (const text of answers.map((branch) => textOf(branch.tokens).trim())) tally.set(text, (tally.get(text) ?? 0) + 1);
  const [text, most] = [...tally].sort((a, b) => b[1] - a[1])[0];
  return html`<p class="hint">Vote: ${most > 1 ? html`${most} of ${answers.length} answers are <q>${text.slice(0, 60)}</q>, ${tally.size} different ones` : `no two of ${answers.length} answers are equal`}.</p>`;
}

// best_of: what is shown, and the rejected answers on demand
function ranked() {
  const answers = state.branches.filter((b) => b.parent === null);
  const { best_of, n = 1 } = answers[0]?.tokens[0]?.segment.params ?? {};
  if (!(best_of > n)) return nothing;
  return html`<p class="hint">Best of ${best_of}: ${n} with the highest mean log-probability, ${best_of - n} rejected${
    answers.length > n ? " (dimmed; drawn again with the same seed)." : html`. The API does not send these. ${state.offline ? nothing : html`<button class="link" @click=${drawRejected}>Draw them</button>`}`}</p>`;
}

function compared() {
  const left = current(), right = branchOf(state.other);
  if (!left || !right) return nothing;
  let same = 0;
  while (same < Math.min(left.tokens.length, right.tokens.length) && left.tokens[same].id === right.tokens[same].id) same++;
  const column = (branch) => html`<div class="column"><h3>${branch.label}</h3>
    <p class="prose" dir="auto"><span class="shared">${textOf(branch.tokens.slice(0, same))}</span><mark>${textOf(branch.tokens.slice(same))}</mark></p>
    <small>${mean(branch)}</small></div>`;
  return html`<div class="two">${column(left)}${column(right)}</div>
    <p class="hint">${same === left.tokens.length && same === right.tokens.length ? "equal, token by token" : html`equal for ${count(same)} tokens`}</p>`;
}

function mean(branch) {
  const known = branch.tokens.filter((t) => t.record);
  return known.length ? `${branch.tokens.length} tokens, mean log-probability ${(logprobOf(known) / known.length).toFixed(3)}` : "";
}

export function tree() {
  if (!state.branches.length) return nothing;
  return html`<section class="card" aria-label="branches"><h2>${term("Branches")}</h2>
    <ul class="tree">${forks(state.branches.filter((b) => b.parent === null))}</ul>${ranked()}${votes()}${compared()}</section>`;
}

export function facts(branch) {
  const usage = branch.usage, wait = branch.firstToken - branch.started;
  const made = branch.tokens.length;
  const details = usage?.completion_tokens_details;
  return html`<p class="facts">
    <span>${made} tokens</span>
    ${branch.firstToken && !branch.score ? html`<span>first after ${seconds(wait / 1000)}</span>` : nothing}
    ${usage ? html`<span>${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached</span>` : nothing}
    ${details?.accepted_prediction_tokens + details?.rejected_prediction_tokens
      ? html`<span>drafts: ${details.accepted_prediction_tokens} accepted, ${details.rejected_prediction_tokens} rejected</span>` : nothing}
    <span>${branch.status === "done" ? `ended by ${branch.finish}` : STATUS[branch.status] ?? branch.status}</span>
    <span>seed ${branch.tokens.at(-1)?.segment.params.seed ?? "–"}</span></p>
    ${branch.loop ? html`<p class="warn">The end repeats itself: ${branch.loop} tokens.</p>` : nothing}
    ${branch.warnings.map((warning) => html`<p class="warn">${warning}</p>`)}`;
}
