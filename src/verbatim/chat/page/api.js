// Requests to this server. In: plain objects. Out: plain objects, or a Trouble with the server's
// own words. No other host is contacted: paths are relative to the page.

import { kept, keep } from "./kept.js";

export class Trouble extends Error {
  constructor(message, { status = 0, code = "", param = null, retry = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retry });
  }
}

export const LOST = "The server does not answer.";
export const hasKey = () => Boolean(kept("key"));

export function setKey(value) {
  // fetch refuses other characters in a header
  if (value && !/^[!-~]+$/.test(value)) throw new Trouble("An API key has no spaces and ASCII characters only.");
  keep("key", value);
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Trouble(LOST);
}

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (hasKey()) headers.authorization = `Bearer ${kept("key")}`;
  const response = await fetch(path, { ...options, headers }).catch(lost);
  if (response.ok) return response;
  const { error = {} } = await response.json().catch(() => ({}));
  const message = typeof error === "string" ? error : error.message; // Ollama's routes send a string
  throw new Trouble(message ?? `The server answered ${response.status}.`, {
    status: response.status, code: error.code, param: error.param,
    retry: Number(response.headers.get("retry-after")) || 0,
  });
}

export const get = async (path) => (await call(path)).json();

export const post = async (path, body, signal) =>
  (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();

// Server-sent events of a POST. Yields the parsed data of each; ends at [DONE], and throws where the
// connection ends before it.
export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) throw new Trouble(LOST);
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue; // a keep-alive comment
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Trouble(data.error.message, { ...data.error, status: 500 });
      yield data;
    }
  }
}
