// npm's openai and the AI SDK against our server: node client_calls.mjs NAME URL MODEL, from a folder with their node_modules.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [name, url, model] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "x.js"));
const load = (id) => import(pathToFileURL(require.resolve(id)).href);
const messages = [{ role: "user", content: "Say hello." }];

const calls = {
  async openai() {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: url + "/v1", apiKey: "unused", maxRetries: 0 });
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1 });
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (e) => e.status === 400 && e.param === "temperature");
    const cancelled = await client.chat.completions.create({ model, messages, stream: true });
    for await (const _ of cancelled) break;
    const schema = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
    const made = await client.chat.completions.create({
      model, messages, max_tokens: 300, temperature: 0, response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
    });
    assert.equal(typeof JSON.parse(made.choices[0].message.content).yes, "boolean");
    const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 8 });
    assert.ok(response.output_text);
  },
  async ai() {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const { generateText, streamText, generateObject, jsonSchema } = await load("ai");
    const provider = createOpenAICompatible({ name: "ours", baseURL: url + "/v1", supportsStructuredOutputs: true });
    const common = { model: provider.chatModel(model), prompt: "Say hello.", maxOutputTokens: 8, seed: 1, maxRetries: 0 };
    const whole = await generateText(common);
    let text = "";
    for await (const piece of streamText(common).textStream) text += piece;
    assert.equal(text, whole.text);
    const schema = jsonSchema({ type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false });
    const made = await generateObject({ ...common, maxOutputTokens: 60, schema });
    assert.equal(typeof made.object.yes, "boolean");
    await assert.rejects(generateText({ ...common, model: provider.chatModel("nope") }), (e) => e.statusCode === 404);
    const stop = new AbortController();
    for await (const _ of streamText({ ...common, maxOutputTokens: 500, abortSignal: stop.signal }).textStream) {
      stop.abort();
      break;
    }
  },
};

await calls[name]();
console.log("ok");
