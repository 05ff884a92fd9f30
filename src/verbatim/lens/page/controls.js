// Every parameter of a completion, from the server's table (base/params.py), with its value and
// where the value comes from.

import { html, nothing } from "./vendor/lit-html.js";
import { FILTERS } from "./sampler.js";
import { changed, state } from "./store.js";

const GROUPS = {
  Distribution: ["temperature", ...FILTERS, "xtc_threshold", "seed"],
  "Length and stops": ["max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos", "skip_special", "on_loop"],
  "Penalties and bans": ["repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_range", "no_repeat_ngram", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_breakers", "logit_bias", "allowed_token_ids", "banned_token_ids"],
  Structure: ["json_schema", "regex", "grammar", "choice"],
  "Several answers": ["n", "best_of", "num_beams", "num_return_sequences", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"],
  Diffusion: ["remasking", "block_length", "denoising_steps", "confidence_threshold", "entropy_threshold"],
  Engine: ["speculate", "priority", "adapter", "cache_salt", "logprobs_mode"],
};
// The page sets these itself.
const OWN = ["explain", "receipt", "logprobs", "prompt_logprobs", "output_prefix"];

// A request with a limit on its length does not stop at a loop.
const isReported = (name) => name === "on_loop" && state.params.max_tokens !== undefined;
const valueOf = (name) =>
  state.params[name] ?? (isReported(name) ? "report" : state.info.parameters[name].default);

function originOf(name) {
  if (state.params[name] !== undefined) return "you";
  return OWN.includes(name) ? "the Lens" : state.info.parameters[name].origin;
}

function setParam(name, value) {
  const rule = state.info.parameters[name];
  const same = JSON.stringify(value) === JSON.stringify(rule.default);
  if (value === undefined || same) delete state.params[name];
  else state.params[name] = value;
  if (state.trouble?.param === name) state.trouble = null;
  document.getElementById(`p-${name}`).setCustomValidity("");
  changed();
}

function reset() {
  for (const box of document.querySelectorAll(".control :invalid")) box.dispatchEvent(new Event("reset"));
  state.params = {};
  changed();
}

function checkInteger({ low, high }, value) {
  const most = Math.min(high ?? Infinity, Number.MAX_SAFE_INTEGER);
  if (Number.isInteger(value) && value >= (low ?? -Infinity) && value <= most) return;
  throw new Error(most === Number.MAX_SAFE_INTEGER ? `a whole number from ${low} to 2⁵³ − 1` : `a whole number from ${low} to ${most}`);
}

// text of an input -> value; undefined: not set. Throws with a sentence for people.
function parse(rule, text) {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  switch (rule.kind) {
    case "int":
    case "float": {
      const value = Number(trimmed);
      if (rule.kind === "int") checkInteger(rule, value);
      if (!Number.isFinite(value)) throw new Error("a number, please");
      return value;
    }
    case "ids":
      return trimmed.split(/[\s,]+/).map((text) => {
        if (/^\d+$/.test(text)) return Number(text);
        throw new Error("token ids, please: 5, 17");
      });
    case "strings":
      return JSON.parse(trimmed.startsWith("[") ? trimmed : JSON.stringify([trimmed]));
    case "schema":
    case "bias":
      return JSON.parse(trimmed);
    default:
      return text;
  }
}

function written(rule, value) {
  if (value === null || value === undefined) return "";
  if (rule.kind === "ids") return value.join(", ");
  if (Array.isArray(value) || typeof value === "object") return value.length === 0 ? "" : JSON.stringify(value);
  return String(value);
}

function input(name, rule) {
  const value = valueOf(name), id = `p-${name}`;
  const choices = rule.default === null ? [null, ...rule.choices] : rule.choices;
  const take = (event) => {
    const box = event.target;
    try {
      setParam(name, event.type === "reset" ? undefined : parse(rule, box.value));
      box.value = written(rule, valueOf(name));
    } catch (error) {
      const message = error instanceof SyntaxError ? "this is not JSON" : error.message;
      box.setCustomValidity(message);
      state.trouble = { message: `${name}: ${message}`, param: name };
      changed();
    }
  };
  if (rule.kind === "bool")
    return html`<input id=${id} type="checkbox" .checked=${value} @change=${(e) => setParam(name, e.target.checked)} />`;
  if (rule.kind === "choice")
    return html`<select id=${id} @change=${(e) => setParam(name, choices[e.target.selectedIndex])}>
      ${choices.map((choice) => html`<option ?selected=${choice === value}>${choice ?? "the model's"}</option>`)}
    </select>`;
  if (["schema", "str"].includes(rule.kind) && ["json_schema", "grammar", "regex"].includes(name))
    return html`<textarea id=${id} rows="2" spellcheck="false" placeholder=${name === "json_schema" ? '{"type": "object"}' : ""} .value=${written(rule, value)} @change=${take} @reset=${take}></textarea>`;
  return html`<input id=${id} inputmode=${["int", "float"].includes(rule.kind) ? "decimal" : "text"} spellcheck="false" autocomplete="off"
    placeholder=${{ seed: "server chooses", max_tokens: "until the model ends" }[name] ?? ""} .value=${written(rule, value)} @change=${take} @reset=${take} />`;
}

function control(name) {
  const rule = state.info.parameters[name], range = rule?.slider;
  if (!rule) return nothing;
  const wrong = state.trouble?.param === name;
  return html`<div class="control ${wrong ? "wrong" : ""}" title=${rule.help}>
    <label for=${`p-${name}`}>${name}</label>
    <span class="origin ${originOf(name) === "you" ? "mine" : ""}">${originOf(name)}</span>
    ${input(name, rule)}
    ${range
      ? html`<input type="range" aria-label=${`${name} slider`} min=${range[0]} max=${range[1]} step=${range[2]}
          .value=${String(valueOf(name))} @input=${(e) => setParam(name, Number(e.target.value))} />`
      : nothing}
  </div>`;
}

export function controls() {
  const mine = Object.keys(state.params).length;
  return html`${Object.entries(GROUPS).map(
      ([title, names], i) => html`<details class="group" ?open=${i === 0}>
        <summary>${title} ${names.some((n) => state.params[n] !== undefined) ? html`<b class="dot" title="changed"></b>` : nothing}</summary>
        ${names.map(control)}
      </details>`,
    )}
    <details class="group">
      <summary>Effective parameters</summary>
      <table class="plain">
        <tbody>
          ${Object.keys(state.info.parameters).map((name) => {
            const shown = OWN.includes(name) ? { explain: state.info.max_logprobs, receipt: true }[name] : valueOf(name);
            return html`<tr><th scope="row">${name}</th><td>${written(state.info.parameters[name], shown) || "–"}</td>
              <td class="origin">${name === "seed" && state.params.seed === undefined ? "server" : originOf(name)}</td></tr>`;
          })}
        </tbody>
      </table>
    </details>
    ${mine ? html`<button class="link" @click=${reset}>Reset ${mine} to defaults</button>` : nothing}`;
}
