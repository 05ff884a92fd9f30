// Answers: the shown path becomes a request to /v1/chat/completions, its stream becomes a node.
//
// The page sends what the user set and nothing else: every other parameter is the model's own. A
// seed is chosen by the server and kept with the answer, so an answer that was cut can be continued
// or explained later: the same request with the same seed has the same tokens.

import { LOST, post, stream, Trouble } from "./api.js";
import * as db from "./db.js";
import { lostServer } from "./models.js";
import {
  add, addNode, announce, changed, children, keepNode, path, running, saveNode, saveSoon, state, toast,
} from "./store.js";

const FIELDS = { schema: "JSON schema", tools: "Tools", more: "More request fields" };

// A setting that the user wrote as JSON.
export function parsed(name, text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Trouble(`${FIELDS[name]}: this is not JSON (${error.message}).`, { param: name });
  }
}

// What the settings of a conversation add to a request.
export function settingsOf({ params, schema, tools, more, reasoning }) {
  const form = parsed("schema", schema), functions = parsed("tools", tools);
  return {
    ...params,
    ...(form === undefined ? {} : { response_format: { type: "json_schema", json_schema: { name: "answer", schema: form } } }),
    ...(functions === undefined ? {} : { tools: functions.map((one) => (one.type ? one : { type: "function", function: one })) }),
    ...(reasoning ? { reasoning_effort: reasoning } : {}),
    ...parsed("more", more),
  };
}

export function fileText({ name, text }) {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

function messageOf({ role, content, files = [], calls = [], callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (role === "user") return { role, content: [...files.map(fileText), content].filter(Boolean).join("\n\n") };
  const tool_calls = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  return { role, content: content || null, ...(calls.length ? { tool_calls } : {}) };
}

// Answers without a text are left out. Two messages of the user in a row, which many templates
// refuse, become one.
export function messagesOf(nodes, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    if (node.role === "assistant" && !node.content && !node.calls?.length) continue;
    const next = messageOf(node), last = messages.at(-1);
    if (next.role === "user" && last?.role === "user") last.content += `\n\n${next.content}`;
    else messages.push(next);
  }
  return messages;
}

// ------------------------------------------------------------------------------------- requests

// Write the answer to `parent` (a node id), as a new version, or behind what `into` has.
export async function answer(parent, into = null) {
  const { chat } = state;
  let sent;
  try {
    sent = settingsOf(chat.settings);
  } catch (error) {
    state.drawer = true;
    return toast(error.message);
  }
  const before = path(parent);
  const fresh = { status: "waiting", error: "", finish: "", loop: 0, warnings: [], note: "" };
  const node = into ? Object.assign(into, fresh) : addNode({ parent, role: "assistant", model: chat.model, ...fresh });
  const messages = messagesOf(before, chat.settings.system);
  if (into) {
    messages.push({ role: "assistant", content: node.content });
    sent = { ...sent, seed: node.seed };
    node.continued = true;
  } else node.sent = sent;
  const run = { node, stop: new AbortController(), gone: false, timer: 0 };
  running.set(node.id, run);
  changed();
  await keepNode(node);
  const body = {
    model: node.model, messages, ...sent, receipt: true, report_params: true,
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  return write(run, body);
}

async function write(run, body) {
  const { node, stop } = run;
  const clock = { started: performance.now(), tokens: node.tokens ?? 0 };
  let receipt = null;
  try {
    for await (const event of patient(node, body, stop.signal)) {
      receipt = read(node, event, clock) ?? receipt;
      saveSoon(node);
      changed();
    }
    node.status = "done";
    announce("The answer is complete.");
  } catch (error) {
    fail(node, error);
  } finally {
    running.delete(node.id);
    if (!run.gone) await saveNode(node, receipt);
    changed();
  }
}

// The events of a request. A model that is being loaded answers 503: the request waits for it.
async function* patient(node, body, signal) {
  for (;;) {
    try {
      return yield* stream("v1/chat/completions", body, signal);
    } catch (error) {
      if (error.status !== 503 || node.status === "streaming") throw error;
      node.note = error.message;
      changed();
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, 1000 * Math.min(error.retry || 1, 5));
        signal.addEventListener("abort", () => resolve(clearTimeout(timer)));
      });
      signal.throwIfAborted();
    }
  }
}

function read(node, event, clock) {
  const now = performance.now();
  node.seed = event.seed ?? node.seed;
  node.fingerprint = event.system_fingerprint ?? node.fingerprint;
  for (const { delta = {}, finish_reason } of event.choices) {
    const text = delta.content || "", thought = delta.reasoning_content || "";
    if (text || thought || delta.tool_calls) Object.assign(node, { status: "streaming", note: "" });
    if (node.status === "streaming") clock.first ||= now;
    if (thought) node.reasoning = (node.reasoning ?? "") + thought;
    if (text && node.reasoning && !node.thoughtMs) node.thoughtMs = now - clock.first;
    node.content += text;
    for (const call of delta.tool_calls ?? []) addCall(node, call);
    if (finish_reason) node.finish = finish_reason;
  }
  if (event.usage) {
    const { completion_tokens, total_tokens } = event.usage;
    clock.early ??= completion_tokens;
    const seconds = (now - clock.first) / 1000, later = completion_tokens - clock.early;
    if (clock.first && event.choices.length) Object.assign(node, { rate: later > 0 ? later / seconds : 0, waitMs: clock.first - clock.started });
    Object.assign(node, { tokens: clock.tokens + completion_tokens, context: total_tokens });
    if (event.usage.prompt_tokens_details) node.usage = event.usage;
  }
  if (event.warnings) node.warnings = event.warnings;
  if (event.loops) [node.loop] = event.loops;
  if (event.params) node.params = event.params;
  return event.receipt;
}

function addCall(node, { index, id, function: { name, arguments: args } }) {
  node.calls ??= [];
  const call = (node.calls[index] ??= { id: "", name: "", args: "" });
  call.id ||= id ?? "";
  call.name ||= name ?? "";
  call.args += args ?? "";
}

function fail(node, error) {
  if (error.name === "AbortError") return Object.assign(node, { status: "stopped", note: "" });
  const begun = node.content || node.reasoning || node.calls?.length;
  Object.assign(node, { status: begun ? "interrupted" : "error", error: error.message, note: "" });
  if (error.status === 401) state.askKey = true;
  if (error.message === LOST) lostServer();
  if (!(error instanceof Trouble)) console.error(error);
  announce(error.message);
  return node;
}

// ------------------------------------------------------------------------------ what buttons do

export async function send(text, files = []) {
  const { chat } = state;
  if (!chat.title) chat.title = titleFrom(text, files);
  const node = await add({ parent: chat.leaf, role: "user", content: text, ...(files.length ? { files } : {}) });
  await answer(node.id);
}

function titleFrom(text, [file]) {
  const [line] = text.trim().split("\n");
  const title = line || (file?.name ?? "");
  return title.length > 80 ? `${title.slice(0, 79)}…` : title;
}

export async function resend(node, text) {
  state.editing = null;
  const { parent, files } = node;
  const next = await add({ parent, role: "user", content: text, ...(files ? { files } : {}) });
  await answer(next.id);
}

export function regenerate(node) {
  const { params } = state.chat.settings;
  if (params.seed !== undefined || params.temperature === 0)
    toast(`${params.temperature === 0 ? "Temperature 0" : "A fixed seed"} gives the same answer again, unless another setting changed.`);
  return answer(node.parent);
}

export const goOn = (node) => answer(node.parent, node);
export const canGoOn = (node) => Boolean(node.content) && !node.calls?.length;

export function stopAll(chat = state.chat.id) {
  for (const { node, stop } of running.values()) if (node.chat === chat) stop.abort();
}

export const isRunning = (chat = state.chat.id) => [...running.values()].some(({ node }) => node.chat === chat);

// The results of the calls of an answer, in their order, then the next answer.
export async function sendResults(node, results) {
  let parent = node.id;
  for (const [i, call] of node.calls.entries()) {
    const next = await add({ parent, role: "tool", content: results[i] ?? "", callId: call.id, name: call.name });
    parent = next.id;
  }
  await answer(parent);
}

export const hasResults = (node) => children(node.id).some(({ role }) => role === "tool");

// --------------------------------------------------------------------------------------- Explain

// Open the tokens of an answer in the Lens, by its receipt. An answer that was cut has none: it is
// made again up to there, which gives the same tokens and a receipt.
export async function explain(node) {
  const address = `lens#answer=${node.id}`;
  if (await db.one("receipts", node.id)) return open(address, "_blank");
  try {
    toast("Making the same tokens again, for a receipt …");
    const receipt = await receiptOf(node);
    await db.write({ put: { receipts: [{ id: node.id, chat: node.chat, receipt }] } });
    if (open(address, "_blank")) return toast("Opened in the Lens.");
    return toast("The same tokens are ready.", "Open the Lens", () => open(address, "_blank"));
  } catch (error) {
    return toast(error.message);
  }
}

async function receiptOf(node) {
  const body = {
    model: node.model, messages: messagesOf(path(node.parent), state.chat.settings.system), ...node.sent,
    seed: node.seed, max_completion_tokens: node.tokens, receipt: true,
  };
  const { choices: [{ message }], receipt } = await post("v1/chat/completions", body);
  const text = message.content ?? "";
  if (!text.startsWith(node.content) && !node.content.startsWith(text))
    throw new Trouble("The system prompt, the model or an earlier message has changed since: the same request is not known any more.");
  return receipt;
}

