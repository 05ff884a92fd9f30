// Generation: prompts to branches. Chat and raw text take one path: /tokenize, then
// /v1/completions with token ids, so the page always knows the ids that the model reads.
//
// Noise is a function of (seed, position, id). A branch therefore sends prompt + tokens so far as
// its prompt, and everything it does not change is drawn as before. `output_prefix` says how many of
// these are output: grammar, penalties and min_tokens continue.

import { post, stream } from "./api.js";
import { keyFromHex, noiseKey } from "./noise.js";
import { Row } from "./sampler.js";
import {
  announce, changed, current, fail, forget, isRunning, newBranch, newId, remember, show, state, undo,
} from "./store.js";

const MOST_EXPLAINED = 250_000; // candidates that the server reports for one request

// Without a limit of the user a text ends where the model ends it, or where the server would explain
// no more tokens. -1: no limit; without the field the server's is 16 tokens.
function limit(promptIds, { num_beams = 1, n = 1, best_of = n, num_return_sequences = 1 }) {
  const { context, max_logprobs } = state.info, width = Math.max(num_beams, best_of, num_return_sequences);
  const most = Math.floor(MOST_EXPLAINED / (max_logprobs * width));
  return context - promptIds.length <= most ? -1 : most;
}

export function messages() {
  const all = state.system ? [{ role: "system", content: state.system }] : [];
  return [...all, ...state.turns, { role: "user", content: state.input }];
}

async function promptIds() {
  const body = state.mode === "chat" ? { messages: messages() } : { prompt: state.input };
  const { tokens } = await post("/tokenize", body);
  return tokens;
}

// Send what the composer holds, as a new run; `step`: the first token of one.
export async function send(more = {}, step = false) {
  state.trouble = null;
  state.asking = true;
  changed();
  try {
    const answered = current();
    if (state.mode === "chat" && answered?.asked && answered.tokens.length) {
      const said = state.vocab.text(answered.tokens.map((token) => token.id));
      const before = answered.asked.filter((turn) => turn.role !== "system");
      state.turns = [...before, { role: "assistant", content: said }];
    }
    const asked = state.mode === "chat" ? messages() : null;
    const ids = await promptIds();
    remember();
    stopAll();
    state.branches = [];
    state.rows.clear();
    const params = { ...state.params, ...more };
    const several = (params.num_return_sequences ?? params.n ?? 1) > 1;
    const answer = (i) => newBranch({ promptIds: ids, asked, label: several ? `answer ${i + 1}` : "run" });
    const first = answer(0);
    show(first.id, -1);
    state.following = true;
    await generate([first], params, { answer, step });
    if (first.status === "error" && !first.tokens.length) undo(); // refused: the last run stays
  } catch (error) {
    fail(error);
  } finally {
    state.asking = false;
    changed();
  }
}

// The parameters of a request with the defaults that the model states, so that every view shows what
// the server sampled with. Greedy decoding and beam search use none of them.
function inForce(given) {
  if (given.temperature === 0 || (given.num_beams ?? 1) > 1) return given;
  const stated = Object.entries(state.info.parameters).filter(([, rule]) => rule.origin !== "default");
  return { ...Object.fromEntries(stated.map(([name, rule]) => [name, rule.default])), ...given };
}

// Continue the branches in `places` (equal so far) with one request. The place of a branch is its
// choice. A choice without a branch gets one from `answer`, or is not shown. `step`: the request is
// one step of a longer answer.
async function generate(places, params, { answer = null, step = false } = {}) {
  const begun = places.filter(Boolean), [first] = begun;
  const written = (params.num_beams ?? 1) > 1 ? 0 : first.tokens.length;
  const ids = [...first.promptIds, ...first.tokens.map((token) => token.id)];
  const given = { ...params, output_prefix: written || undefined };
  const segment = { id: newId(), promptIds: ids, params: inForce(given), from: first.tokens.length, step };
  const stop = new AbortController();
  const before = begun.map((branch) => ({ ...branch }));
  const begin = (branch) => Object.assign(branch, {
    stop, status: "waiting", error: null, started: performance.now(), firstToken: 0, finish: null, usage: null,
    warnings: [], loop: 0, score: null,
  });
  begun.forEach(begin);
  state.proof = null;
  const place = (choice) => (places[choice] ??= answer && begin(answer(choice)));
  const streamed = (given.best_of ?? 1) <= (given.n ?? 1);
  const body = {
    model: state.info.model, prompt: ids, ...given, max_tokens: given.max_tokens ?? limit(ids, given), explain: state.info.max_logprobs,
    receipt: true, ...(streamed ? { stream: true, stream_options: { include_usage: true } } : {}),
  };
  try {
    if (streamed)
      for await (const event of stream("/v1/completions", body, stop.signal))
        read(event, place, segment);
    else {
      const whole = await post("/v1/completions", body, stop.signal);
      read({ ...whole, usage: null, receipt: undefined }, place, segment);
      read({ ...whole, choices: [] }, place, segment);
    }
    for (const branch of places.filter(Boolean)) Object.assign(branch, { status: "done", ended: performance.now() });
    announce(`${first.tokens.length} tokens`);
  } catch (error) {
    for (const branch of places.filter(Boolean)) branch.status = stop.signal.aborted ? "stopped" : "error";
    first.error = error;
    // refused: a branch that had ended stays as it was
    if (error.status >= 400)
      begun.forEach((branch, i) => before[i].status !== "waiting" && Object.assign(branch, before[i], { error }));
    fail(error);
  } finally {
    state.requests++;
    changed();
  }
}

export function read(event, place, segment) {
  if (event.seed !== undefined && event.seed !== null) segment.params.seed ??= event.seed;
  for (const choice of event.choices) {
    const branch = place(choice.index);
    if (!branch) continue;
    branch.status = "running";
    for (const record of choice.explain ?? []) {
      branch.firstToken ||= performance.now();
      push(branch, { id: record.token, record, segment, choice: choice.index, draw: drawOf(record, segment.params, choice.index) });
    }
    if (choice.finish_reason) branch.finish = choice.finish_reason;
    if (choice.loop) branch.loop = choice.loop;
    branch.score = choice.score ?? branch.score;
  }
  if (event.warnings) segment.warnings = event.warnings;  // in the last chunk with a finish_reason
  if (event.receipt) close(event, place, segment);
  changed();
}

// Which draw of its request an answer is. best_of returns the best of its draws; the key tells.
export function drawOf({ key }, { seed, n = 1, best_of = n }, index) {
  if (best_of === n) return index;
  return Array.from({ length: best_of }, (_, draw) => noiseKey(BigInt(seed), draw)).indexOf(keyFromHex(key));
}

function push(branch, token) {
  branch.tokens.push(token);
  if (state.following && branch.id === state.current) state.selected = branch.tokens.length - 1;
}

// of a segment with a receipt: the receipt's, and those that change no token
const UNPROVEN = ["cache_salt", "priority", "speculate"];
export function provenParams({ params, receipt }) {
  const own = UNPROVEN.filter((name) => params[name] !== undefined).map((name) => [name, params[name]]);
  const proven = Object.entries(receipt.params).filter(([, value]) => value !== null);
  return { ...Object.fromEntries(proven), ...Object.fromEntries(own) };
}

function close(event, place, segment) {
  Object.assign(segment, { receipt: event.receipt, usage: event.usage });
  segment.params = provenParams(segment);
  const loops = event.loops ?? [];
  for (const choice of event.receipt.choices) {
    const branch = place(choice.index);
    if (!branch) continue;
    const known = branch.tokens.length - segment.from;
    for (const id of choice.token_ids.slice(known))
      push(branch, { id, record: null, segment, choice: choice.index });
    branch.finish = choice.finish.join(": ");
    Object.assign(branch, { usage: event.usage, warnings: segment.warnings ?? [] });
    branch.loop = loops[choice.index] ?? branch.loop;
    branch.score = event.scores?.[choice.index] ?? branch.score;
  }
}

export function stopAll() {
  for (const branch of state.branches) branch.stop?.abort();
}

// ---------------------------------------------------------------------------------------- branches

function fork(parent, index, tokens, label) {
  remember();
  const { promptIds, asked } = parent;
  const branch = newBranch({ parent: parent.id, forkAt: index, tokens, promptIds, asked, label });
  state.other ??= parent.id;
  show(branch.id, index);
  state.other = parent.id;
  return branch;
}

// Take another candidate at `index` and continue from it.
export async function branchFrom(parent, index, id) {
  const before = parent.tokens[index];
  const drawn = before.drawn ?? { id: before.id, record: before.record }; // what the sampler drew here
  const forced = { ...before, id, record: recordOf(drawn.record, id), forced: true, drawn };
  const chosen = id === drawn.id ? { ...before, ...drawn, forced: undefined, drawn: undefined } : forced;
  const branch = fork(parent, index, [...parent.tokens.slice(0, index), chosen], state.vocab.quoted(id));
  await goOn(branch, before.draw, whole(parent, before.segment));
  if (branch.error?.param === "output_prefix") outsideGrammar(branch);
}

// The grammar allows no token after the chosen one, or not even that one: say so.
function outsideGrammar(branch) {
  const message = branch.error.message.replace(/^output_prefix:? */, "");
  const complete = message.includes("is complete");
  if (complete) Object.assign(branch, { status: "done", finish: "stop", error: null });
  else if (state.current === branch.id) undo();
  state.trouble = complete ? null : { message: `No branch there: ${message}.`, param: null };
  changed();
}

// Draw the token at `index` and everything after it under other settings.
export async function branchWith(parent, index, changes, name = "") {
  const { draw, segment } = parent.tokens[index];
  const label = name || Object.entries(changes).map(([name, value]) => `${name} ${value}`).join(", ");
  const branch = fork(parent, index, parent.tokens.slice(0, index), label || "again");
  await goOn(branch, draw, { ...whole(parent, segment), ...changes });
}

// The same prompt one token per pass: in the model's other mode, or its first masked position per step.
export function fromLeftToRight(branch) {
  const off = Object.fromEntries(["block_length", "denoising_steps", "remasking", "confidence_threshold", "entropy_threshold"].map((name) => [name, undefined]));
  const { block_length } = branch.tokens[0].segment.params, one = { ...off, remasking: "sequential", block_length };
  return branchWith(branch, 0, state.info.diffusion.both ? off : one, "left to right");
}

// The parameters of a segment; of a step with the lengths of the whole answer.
function whole({ tokens }, { params, step }) {
  if (!step) return params;
  const { max_tokens, min_tokens } = tokens.find((token) => !token.segment.step)?.segment.params ?? state.params;
  return { ...params, max_tokens, min_tokens };
}

// Continue one branch. Each answer of a request has its own noise (`draw`): the third answer
// continues as the third of a request for three. Beams have no noise.
function goOn(branch, draw = 0, { best_of, num_return_sequences, ...params }, step = false) {
  const places = [];
  places[params.num_beams > 1 ? 0 : draw] = branch;
  return generate(places, { ...params, n: places.length > 1 ? places.length : undefined }, { step });
}

// best_of sends its best answers only. The same seed draws all of them again, as n answers.
export async function drawRejected() {
  const best = state.branches.filter((b) => b.parent === null), [{ tokens, promptIds, asked }] = best;
  const { best_of, ...params } = tokens[0].segment.params;
  const shown = best.map((b) => b.tokens[0].draw), places = [];
  remember();
  for (let draw = 0; draw < best_of; draw++)
    if (!shown.includes(draw)) places[draw] = Object.assign(newBranch({ promptIds, asked, label: `rejected ${draw + 1}` }), { rejected: true });
  await generate(places, { ...params, n: best_of });
}

// the lengths of a step: `min_tokens` forbids the end as before
const onlyTokens = ({ min_tokens }, count, written = 0) =>
  ({ max_tokens: count, ...(min_tokens === undefined ? {} : { min_tokens: Math.min(min_tokens, written + count) }) });

// One more token at the end of the current branch.
export async function extend(count = 1) {
  const branch = current();
  if (!branch) return send(onlyTokens(state.params, count), true);
  if (isRunning(branch)) return undefined;
  const { draw, segment } = branch.tokens.at(-1) ?? {};
  state.trouble = null;
  const params = segment ? whole(branch, segment) : state.params;
  remember();
  await goOn(branch, draw, { ...params, ...onlyTokens(params, count, branch.tokens.length) }, true);
  if (branch.error?.status >= 400) forget(); // refused: there is nothing to undo
  return undefined;
}

// the record of the step, seen from another candidate
export function recordOf(record, id) {
  const rank = record?.top.findIndex((candidate) => candidate.id === id) ?? -1;
  if (rank < 0) return null;
  const { logit, logprob, final_prob } = record.top[rank];
  const rival = record.top[rank === 0 ? 1 : 0]; // undefined: the server explains one candidate
  return { ...record, token: id, logit, logprob, final_prob, rank: rank + 1, margin: rival ? logit - rival.logit : null, lead: null };
}

// ------------------------------------------------------------------------------------------- steps

export const rowKey = (token, index, changes = {}) =>
  `${token.segment.id}:${token.choice}:${index}${Object.keys(changes).length ? JSON.stringify(changes) : ""}`;

// The Row of one step; `rest`: with every logit. null: it cannot be known (offline).
export async function rowOf(branch, index, { rest = false, changes = {} } = {}) {
  const token = branch.tokens[index];
  const key = rowKey(token, index, changes);
  const known = state.rows.get(key);
  if (known && (known.whole || !rest)) return known;
  if (state.offline) return known ?? null;
  if (token.record?.denoising_step !== undefined)
    throw new Error("A denoising step's logits belong to the masks of that moment: only the whole answer is computed again.");
  const data = await stepOf(branch, index, { rest, changes });
  const row = new Row(data);
  if (known) known.fill(data.row, data.row_type);
  else state.rows.set(key, row);
  return known ?? row;
}

// The server's report of one step, computed now.
export function stepOf({ tokens }, index, { rest = false, changes = {} } = {}) {
  const { segment, draw } = tokens[index];
  return post("/lens/api/step", {
    prompt: segment.promptIds, params: { ...segment.params, ...changes }, choice: draw ?? 0, rest,
    output: tokens.slice(segment.from, index).map((t) => t.id),
  });
}
