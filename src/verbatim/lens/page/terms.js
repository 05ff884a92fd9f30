// What the words of this page mean: a word is a button that opens its sentence.

import { html } from "./vendor/lit-html.js";

const TERMS = {
  context: "The tokens that the model reads before it writes the next one: the prompt and what is written so far.",
  logits: "One number for each token of the vocabulary. The higher, the more the model expects that token next.",
  softmax: "Turns the logits into probabilities: all are positive, and together they are 1. Entropy (in nats) says how open the choice is; 0: one token has it all.",
  sample: "Draws one token. Each candidate gets its logit and a fixed random number (noise); the largest sum wins.",
  append: "The drawn token becomes part of the context, and the loop begins again.",
  "The canvas": "One block, step by step. Each step draws all masked positions (▒) and keeps some; the tip of a token is its confidence.",
  Candidates: "The most likely tokens at this place, with the probability that the model itself gives them.",
  "What if?": "The same logits and the same noise under other settings. The draw is the one that the server would make.",
  "The funnel": "The stages of the sampler in their order. Each removes tokens or changes their probabilities; what is left goes on.",
  "The draw": "Score = scaled logit + noise, relative to the best. The noise depends on seed, position and token only, so it can be repeated.",
  "Side by side": "Greedy: always the most likely token. Temperature: flatter or steeper. Top-k, top-p, min-p: three ways to cut the unlikely tokens.",
  Branches: "Other texts from the same place: another candidate, or other settings. What branches share is computed once.",
  Steps: "One step computes some tokens of some requests at once. Prefill reads a prompt, decode writes, a draft is a guess that the model checks.",
  "Beside the roofline": "The shortest time that this machine's memory and arithmetic allow for a step, as `verbatim bench` measured it.",
  "KV cache": "What the model remembers of each token, so that it reads the text only once. It is kept in blocks of some tokens.",
};

let panel = null;

function show(event, name) {
  panel ??= Object.assign(document.createElement("div"), { id: "term", popover: "auto" });
  document.body.append(panel);
  panel.textContent = TERMS[name];
  panel.setAttribute("role", "note");
  panel.showPopover();
  const at = event.currentTarget.getBoundingClientRect();
  panel.style.top = `${Math.min(at.bottom + 6, innerHeight - panel.offsetHeight - 6)}px`;
  panel.style.left = `${Math.max(6, Math.min(at.left, innerWidth - panel.offsetWidth - 6))}px`;
}

export const term = (name) => html`<button class="term" type="button" title=${TERMS[name]} @click=${(event) => show(event, name)}>${name}</button>`;
