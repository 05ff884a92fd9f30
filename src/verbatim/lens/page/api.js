// Requests to this server. In: plain objects. Out: plain objects, or a Trouble with the server's
// own words. No other host is ever contacted.

import { stored } from "./store.js";

export class Trouble extends Error {
  constructor(message, { status = 0, code = "", param = null, retry = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retry });
  }
}

let key = stored("sessionStorage", "verbatim-key") || stored("localStorage", "verbatim-key"); // the key that the chat page keeps

export function setKey(value) {
  // fetch refuses other characters in a header, which would read as a server that does not answer
  if (!/^[ -~]+$/.test(value)) throw new Trouble("An API key has ASCII characters only.", { status: 401 });
  key = stored("sessionStorage", "verbatim-key", value);
}

const headers = () => ({
  "content-type": "application/json",
  ...(key ? { authorization: `Bearer ${key}` } : {}),
});

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Trouble("The server does not answer. Is `verbatim serve` still running?");
}

export async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() }).catch(lost);
  if (answer.ok) return answer;
  let problem = {};
  try {
    problem = (await answer.json()).error ?? {};
  } catch {
    // not JSON: the status line must do
  }
  throw new Trouble(problem.message ?? `The server answered ${answer.status}.`, {
    status: answer.status, code: problem.code, param: problem.param,
    retry: Number(answer.headers.get("retry-after")) || null,
  });
}

export const get = async (path) => (await call(path)).json();

export const post = async (path, body, signal) =>
  (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();

// Server-sent events of a POST. Yields the parsed data of each.
export async function* stream(path, body, signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return lost({}); // before [DONE]
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return undefined;
      if (!event.startsWith("data: ")) continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Trouble(data.error.message, data.error);
      yield data;
    }
  }
}
