// The shape of a saved run, on which the views and the proof rely. An error names the place.

import { DEFAULTS } from "./sampler.js";
import { COLOURS } from "./tiles.js";

const MOST_IDS = 2 ** 24; // eight bytes of noise each

function need(holds, path, what) {
  if (!holds) throw new Error(`This file holds a damaged run: ${path} is not ${what}.`);
}

const number = (value, path) => need(Number.isFinite(value), path, "a number");
const id = (value, path) => need(Number.isSafeInteger(value) && value >= 0, path, "a whole number");
const text = (value, path) => need(typeof value === "string", path, "a text");
const key = (value, path) => need(/^[0-9a-f]{16}$/.test(value), path, "a noise key");
const maybe = (of) => (value, path) => value === undefined || value === null || of(value, path);
const list = (of, least = 0) => (value, path) => {
  need(Array.isArray(value) && value.length >= least, path, least ? "a list with an entry" : "a list");
  value.forEach((entry, i) => of(entry, `${path}[${i}]`));
};
const tuple = (...kinds) => (value, path) => {
  need(Array.isArray(value), path, "a list");
  kinds.forEach((of, i) => of(value[i], `${path}[${i}]`));
};
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const object = (fields) => (value, path) => {
  need(isObject(value), path || "the run", "an object");
  for (const [name, of] of Object.entries(fields)) of(value[name], path ? `${path}.${name}` : name);
};
const all = (names, of) => Object.fromEntries(names.map((name) => [name, of]));

const NUMBERS = [
  ...Object.keys(DEFAULTS), "repetition_penalty", "frequency_penalty", "presence_penalty", "n", "best_of", "num_beams", "seed",
];
const params = object(all(NUMBERS, maybe(number)));

const receipt = object({
  prompt_ids: list(id), params: object({}),
  choices: list(object({ index: id, token_ids: list(id), finish: list(text) }), 1),
});
const segment = object({ id, from: id, promptIds: list(id), params, receipt: maybe(receipt) });

const candidate = object({
  id, ...all(["logit", "logprob"], number), ...all(["processed", "final_prob", "noise", "score"], maybe(number)),
});
const record = object({
  position: id, vocab: id, key, top: list(candidate, 1), ...all(["temperature", "entropy", "logit", "logprob", "rank"], number),
  ...all(["margin", "final_prob", "score", "lead"], maybe(number)),
});
const drawn = object({ id, record: maybe(record) });
const token = object({ id, choice: id, segment: id, draw: maybe(number), record: maybe(record), drawn: maybe(drawn) });

const usage = object({
  ...all(["prompt_tokens", "completion_tokens"], id), prompt_tokens_details: object({ cached_tokens: id }),
  completion_tokens_details: maybe(object(all(["accepted_prediction_tokens", "rejected_prediction_tokens"], maybe(id)))),
});
const status = (value, path) => need(["done", "stopped", "error"].includes(value), path, "an end");
const branch = object({
  id, parent: maybe(id), forkAt: id, tokens: list(id), promptIds: list(id), label: text, status, finish: maybe(text),
  usage: maybe(usage), warnings: list(text), loop: id, score: maybe(number), started: number, firstToken: number,
  asked: maybe(list(object({ role: text, content: text }))),
});

const stage = object({ name: text, ...all(["left", "removed", "changed", "mass"], number), top: list(tuple(id, number)) });
const step = object({
  position: id, vocab: id, key, ...all(["peak", "log_total", "entropy", "sigma"], number), stages: list(stage),
  cut: list(tuple(id, number, text)), top: list(tuple(id, number, number), 1),
  row: (value, path) => need(value === undefined, path, "part of a saved run"),
  tail: object({ ...all(["count", "start", "width"], number), best: maybe(number), counts: list(number) }),
});

const run = object({
  info: object({ ...all(["model", "digest", "fingerprint", "backend", "detail", "numerics"], text), vocab: id }),
  vocab: object({ tokens: object({}), control: list(id) }),
  segments: list(segment, 1), tokens: list(token), branches: list(branch, 1), rows: list(tuple(text, step)), current: id,
  selected: number, colour: text,
});

export function checkShape(data) {
  run(data, "");
  const { info, vocab, segments, tokens, branches, rows } = data;
  need(info.vocab <= MOST_IDS, "info.vocab", "a vocabulary");
  need(Object.hasOwn(COLOURS, data.colour), "colour", "one of the colours");
  for (const [name, bytes] of Object.entries(vocab.tokens)) list(id)(bytes, `vocab.tokens.${name}`);
  tokens.forEach((t, i) => need(t.segment < segments.length, `tokens[${i}].segment`, "a request of this run"));
  branches.forEach((b, i) => {
    need(b.tokens.every((place) => place < tokens.length), `branches[${i}].tokens`, "tokens of this run");
    const before = branches.some((other) => other.id === b.parent && other.id < b.id);
    need(b.parent === null || before, `branches[${i}].parent`, "a branch before it");
    need(branches.findIndex((other) => other.id === b.id) === i, `branches[${i}].id`, "an id of its own");
    need(!b.firstToken || b.firstToken >= b.started, `branches[${i}].firstToken`, "a time after its start");
  });
  need(branches.some((b) => b.id === data.current), "current", "a branch of this run");
  rows.forEach(([name, row], i) => {
    need(isRowKey(name), `rows[${i}][0]`, "the name of a step");
    need(row.vocab === info.vocab && row.top.every(([place]) => place < row.vocab), `rows[${i}][1]`, "a step of this vocabulary");
  });
}

// segment:choice:index, and the changed settings as JSON
function isRowKey(name) {
  const [, changes] = name.match(/^\d+:\d+:\d+(\{.*\})?$/s) ?? [, "no"];
  try {
    return !changes || isObject(JSON.parse(changes));
  } catch {
    return false;
  }
}
