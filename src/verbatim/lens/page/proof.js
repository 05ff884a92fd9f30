// The proof: everything that the page shows of the current branch against the receipts and a replay.
//
// 1. The page against the receipts: prompt, ids, parameters, ends, lengths.
// 2. The receipts against the server, which runs them again now.
// 3. The page against the replay: every number of every token and of every opened step.
//
// Times, cache hits and accepted drafts are measurements of the first run. They are not replayed.

import { post, Trouble } from "./api.js";
import { drawOf, provenParams, recordOf, stepOf } from "./run.js";
import { announce, branchOf, changed, current, fail, state } from "./store.js";

const STRUCTURES = ["json_schema", "regex", "grammar", "choice"];
const MEASURED = ["row", "row_type", "cached_tokens", "seconds"]; // of a step

class Different extends Error {
  constructor(message, index = null) {
    super(message);
    this.index = index;
  }
}

function check(holds, message, index = null) {
  if (!holds) throw new Different(message, index);
}

// Compare two JSON values; returns how many numbers and texts are equal.
function equal(shown, proven, name, index, by = "the replay") {
  const plain = (value) => value === null || typeof value !== "object";
  const a = shown ?? null, b = proven ?? null;
  if (plain(a) || plain(b)) {
    const said = (value) => (plain(value) ? JSON.stringify(value) : "something else");
    const place = index === null ? "" : `token ${index + 1}: `;
    check(a === b, `${place}the page shows ${name} ${said(a)}, ${by} has ${said(b)}`, index);
    return 1;
  }
  const names = Array.isArray(b) ? [...Array(Math.max(a.length ?? 0, b.length)).keys()] : [...new Set([...Object.keys(a), ...Object.keys(b)])];
  const inside = (key) => (Array.isArray(b) ? `${name}[${key}]` : name ? `${name}.${key}` : key);
  return names.reduce((sum, key) => sum + equal(a[key], b[key], inside(key), index, by), 0);
}

export async function prove() {
  const branch = current(), proof = { index: null };
  const report = (kind, message, index = null) => {
    if (state.proof !== proof) return; // another is shown
    Object.assign(proof, { state: kind, message, index });
    if (kind !== "running") announce(`${kind}: ${message}`);
    changed();
  };
  state.proof = proof;
  report("running", "replaying the receipt …");
  try {
    const { tokens, numbers, open, limited } = await proveBranch(branch, report);
    const few = limited ? ` Only the first ${state.info.max_logprobs} candidates of each token were compared, the limit of this server.` : "";
    const rest = few + (open ? ` ${open} tokens of this branch have no receipt.` : "");
    return report("identical", `${tokens} tokens and ${numbers.toLocaleString("en")} numbers, replayed now, are identical.${rest}`);
  } catch (error) {
    if (error instanceof Different) return report("different", error.message, error.index);
    if (error.param === "receipt" || error.code === "invalid_parameter") return report("different", error.message);
    if (state.proof === proof) state.proof = null;
    return fail(error);
  }
}

async function proveBranch(branch, report) {
  const { tokens } = branch, segments = [...new Set(tokens.map((t) => t.segment))];
  const proven = segments.filter((segment) => segment.receipt);
  if (!proven.length) throw new Trouble("This run has no receipt: only one that has ended has one.");
  for (const segment of proven) checkReceipt(branch, segment);
  checkEnd(branch);
  checkParent(branch);
  await checkConversation(branch);
  let numbers = 0, drawn = 0;
  for (const segment of proven) {
    const answer = await post("/lens/api/replay", {
      receipt: segment.receipt, explain: Math.min(explained(branch, segment), state.info.max_logprobs),
    });
    numbers += compareReplay(branch, segment, answer);
    drawn += answer.tokens;
  }
  numbers += await compareSteps(branch, proven, report);
  const limited = proven.some((segment) => isLimited(branch, segment));
  return { numbers, tokens: drawn, limited, open: tokens.filter((t) => !t.segment.receipt).length };
}

// ----------------------------------------------------------------------- the page and its receipts

const isIn = (segment) => (token) => token.segment === segment;
const choiceOf = ({ receipt }, token) => receipt.choices.find((choice) => choice.index === token.choice);

function checkReceipt(branch, segment) {
  const { tokens, promptIds } = branch, { from, receipt } = segment;
  const first = tokens.findIndex(isIn(segment)), last = tokens.findLastIndex(isIn(segment));
  check(first === from, `token ${first + 1}: the page shows it as the first of a request that began at token ${from + 1}`, first);
  const before = [...promptIds, ...tokens.slice(0, first).map((token) => token.id)];
  equal(before, receipt.prompt_ids, "prompt token", null, "the receipt");
  equal(segment.promptIds, receipt.prompt_ids, "prompt token", null, "the receipt");
  equal(segment.params, provenParams(segment), "", null, "the receipt");
  for (let index = first; index <= last; index++) {
    const token = tokens[index], id = choiceOf(segment, token)?.token_ids[index - from];
    check(token.segment === segment && token.choice === tokens[first].choice, `token ${index + 1}: the page shows it as one of another answer`, index);
    if (token.forced) check(id !== undefined && id !== token.id && index === last, `token ${index + 1}: the page says that you chose it, the receipt has it as drawn`, index);
    equal(token.forced ? token.drawn?.id : token.id, id, "id", index, "the receipt");
  }
}

function checkEnd(branch) {
  const { tokens, parent, forkAt, status, finish, usage, loop, score } = branch, last = tokens.at(-1), { segment } = last;
  if (!segment.receipt) return;
  const { token_ids, finish: ended } = choiceOf(segment, last), shown = tokens.length - segment.from;
  const whole = !last.forced && shown === token_ids.length;
  // a branch whose request brought no token ends where it was made
  const empty = parent !== null && tokens.length === forkAt + (last.forced ? 1 : 0);
  check(whole || empty, `the page shows ${shown} tokens of the last request, the receipt has ${token_ids.length}`, tokens.length - 1);
  if (whole && status === "done") {
    const total = segment.receipt.choices.reduce((sum, c) => sum + c.token_ids.length, 0);
    equal(finish, ended.join(": "), "finish", null, "the receipt");
    equal(usage?.prompt_tokens, segment.receipt.prompt_ids.length, "prompt_tokens", null, "the receipt");
    if (!(segment.params.best_of > 1 || segment.params.num_beams > 1)) // they count rejected ones
      equal(usage?.completion_tokens, total, "completion_tokens", null, "the receipt");
  } else {
    const complete = status === "done" && last.forced && STRUCTURES.some((name) => segment.params[name] !== undefined);
    const shownEnd = { finish, usage, loop, score }, noEnd = { finish: complete ? "stop" : null, usage: null, loop: 0, score: null };
    check(complete || status !== "done", "the page shows an end that no receipt has", tokens.length - 1);
    equal(shownEnd, noEnd, "", null, "a request without an answer");
  }
}

// a branch differs from its parent at the fork; without a parent it is one answer and its steps
function checkParent({ parent, forkAt, tokens }) {
  const segments = [...new Set(tokens.map((token) => token.segment))];
  if (parent === null) {
    check(forkAt === 0 && segments.slice(1).every((segment) => segment.step) && !tokens.some((token) => token.forced), "the page shows a branch without the one that it comes from");
    return;
  }
  const other = branchOf(parent)?.tokens ?? [];
  const at = tokens.findIndex(({ id, segment }, i) => id !== other[i]?.id || segment !== other[i].segment);
  const same = at < 0 ? tokens.length : at;
  check(same === Math.min(forkAt, tokens.length), `the page shows a branch at token ${forkAt + 1}; it differs from the one before it at token ${same + 1}`, Math.min(same, tokens.length - 1));
}

// a chat: the messages above the tokens give the prompt
async function checkConversation({ asked, promptIds }) {
  if (!asked) return;
  const { tokens } = await post("/tokenize", { messages: asked });
  check(JSON.stringify(tokens) === JSON.stringify(promptIds),
    "the messages that the page shows do not give the tokens of the prompt (a template may write the date)");
}

// ---------------------------------------------------------------------------- the page and a replay

function compareReplay(branch, segment, answer) {
  const { tokens } = branch, { from, receipt } = segment, first = tokens[from];
  const place = answer.choice === first.choice ? from + answer.position : null;
  check(answer.identical, answer.message, place);
  equal(receipt.choices, answer.receipt.choices, "choices", null);
  const at = receipt.choices.indexOf(choiceOf(segment, first)), records = answer.explain[at];
  const limited = isLimited(branch, segment);
  let numbers = 0;
  for (let index = from; tokens[index]?.segment === segment; index++) {
    const token = tokens[index], drawn = records[index - from] ?? null;
    numbers += compareRecord(token.forced ? token.drawn.record : token.record, drawn, index, limited);
    if (token.forced) {
      const fresh = drawn && recordOf(drawn, token.id);
      if (fresh || !limited) compareRecord(token.record, fresh, index, limited);
    }
    if (drawn) equal(token.draw, drawOf(drawn, segment.params, token.choice), "draw", index);
  }
  if (tokens.at(-1).segment === segment && branch.status === "done" && !tokens.at(-1).forced && tokens.length - from === records.length) {
    equal(branch.loop || 0, answer.loops[at], "loop", null);
    equal(branch.score || null, answer.scores[at] || null, "score", null);
  }
  return numbers;
}

// candidates per token of a segment
const explained = ({ tokens }, segment) =>
  tokens.filter(isIn(segment)).reduce((most, { record }) => Math.max(most, record?.top.length ?? 0), 0);

const isLimited = (branch, segment) => explained(branch, segment) > state.info.max_logprobs;

// `limited`: this server explains fewer candidates than that of the run
function compareRecord(shown, fresh, index, limited) {
  if (limited && state.info.max_logprobs === 0) return 0;
  if (!limited || !shown || !fresh) return equal(shown, fresh, "", index);
  const common = (record) => ({
    ...record, top: record.top.slice(0, state.info.max_logprobs), stages: record.stages.map(({ removed_top, ...stage }) => stage),
  });
  return equal(common(shown), common(fresh), "", index);
}

// the opened and saved steps
async function compareSteps(branch, proven, report) {
  const steps = [];
  for (const [key, row] of state.rows) {
    const [, id, choice, place, changes] = key.match(/^(\d+):(\d+):(\d+)(.*)$/s) ?? [], index = Number(place), token = branch.tokens[index];
    if (token && token.segment.id === Number(id) && token.choice === Number(choice) && proven.includes(token.segment))
      steps.push({ row, index, changes: changes ? JSON.parse(changes) : {} });
  }
  const plain = (data) => Object.fromEntries(Object.entries(data).filter(([name]) => !MEASURED.includes(name)));
  let numbers = 0;
  for (const [done, { row, index, changes }] of steps.entries()) {
    report("running", `computing the opened steps again: ${done + 1} of ${steps.length} …`);
    numbers += equal(plain(row.data), plain(await stepOf(branch, index, { changes })), "", index);
  }
  return numbers;
}
