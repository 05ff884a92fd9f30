// The sequence as tiles. Plain DOM, not a template: 2,000 tiles must cost nothing while a slider
// moves, so only new tiles are made and only changed ones are touched.

import { percent } from "./format.js";
import { announce, changed, current, isRunning, select, state } from "./store.js";

// name -> [title, what 0 and 1 mean, value in 0 .. 1: how surprising]
export const COLOURS = {
  probability: ["probability", "certain", "unlikely", (r) => Math.min(1, -r.logprob / 7)],
  rank: ["rank", "first", "64th", (r) => Math.min(1, Math.log2(r.rank) / 6)],
  entropy: ["entropy", "0 nats", "6 nats", (r) => Math.min(1, r.entropy / 6)],
  margin: ["margin", "8 ahead", "8 behind", (r) => Math.max(0, Math.min(1, 0.5 - (r.margin ?? 8) / 16))],
  relative: ["relative to the best", "the best", "1/100", (r) =>
    Math.min(1, (r.top[0].logprob - r.logprob) / Math.log(100))],
};

function describe(token, index) {
  const { record } = token, shown = state.vocab.quoted(token.id);
  if (!record) return `token ${index + 1}, ${shown}, id ${token.id}`;
  return `token ${index + 1}, ${shown}, id ${token.id}, probability ${percent(Math.exp(record.logprob))}, rank ${record.rank}, entropy ${record.entropy.toFixed(2)} nats${token.forced ? ", chosen by you" : ""}`;
}

export class Tiles {
  constructor(box) {
    this.box = box;
    this.shown = []; // the tokens drawn so far
    this.look = "";
    this.selected = -1;
    box.addEventListener("click", (event) => {
      const tile = event.target.closest(".tile");
      if (tile) select(Number(tile.dataset.index));
    });
    box.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = (current()?.tokens.length ?? 0) - 1;
    let to = null;
    if (event.key in steps) to = Math.max(0, Math.min(last, state.selected + steps[event.key]));
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = last;
    if (to === null) return;
    event.preventDefault();
    select(to);
    announce(describe(current().tokens[to], to));
  }

  render() {
    const branch = current(), tokens = branch?.tokens ?? [];
    const look = `${state.colour} ${state.bytes}`;
    let same = 0;
    while (same < tokens.length && this.shown[same] === tokens[same]) same++;
    if (same < this.shown.length) this.cut(same);
    const started = this.shown.length;
    const more = document.createDocumentFragment();
    for (let i = started; i < tokens.length; i++) {
      more.append(this.tile(tokens[i], i));
      this.shown.push(tokens[i]);
    }
    if (tokens.length > started) this.box.append(more);
    if (look !== this.look) {
      this.look = look;
      [...this.box.children].forEach((tile, i) => this.paint(tile, this.shown[i]));
    }
    this.mark();
  }

  cut(length) {
    while (this.box.children.length > length) this.box.lastChild.remove();
    this.shown.length = length;
  }

  tile(token, index) {
    const tile = document.createElement("span");
    tile.id = `tile-${index}`;
    tile.dataset.index = index;
    tile.setAttribute("role", "option");
    tile.title = describe(token, index);
    const text = document.createElement("span");
    text.textContent = state.vocab.show(token.id);
    const small = document.createElement("small");
    small.textContent = `${token.id} · ${state.vocab.hex(token.id)}`;
    tile.append(text, small);
    this.paint(tile, token);
    return tile;
  }

  paint(tile, token) {
    const names = ["tile"];
    if (state.vocab.isControl(token.id)) names.push("control");
    if (token.forced) names.push("forced");
    if (state.vocab.show(token.id).includes("⏎")) names.push("breaks");
    tile.className = names.join(" ");
    const heat = token.record ? COLOURS[state.colour][3](token.record) : 0;
    tile.style.setProperty("--heat", `${Math.round(heat * 100)}%`);
  }

  mark() {
    const { selected } = state;
    this.box.classList.toggle("bytes", state.bytes);
    if (this.selected === selected && this.marked === this.box.children[selected]) return;
    this.marked?.removeAttribute("aria-selected");
    this.marked = this.box.children[selected];
    this.selected = selected;
    if (!this.marked) {
      this.box.removeAttribute("aria-activedescendant");
      return;
    }
    this.marked.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", this.marked.id);
    this.marked.scrollIntoView({ block: "nearest" });
  }
}

// ------------------------------------------------------------------------------------------ playing

let timer = null;

export function play(on) {
  state.playing = on;
  clearInterval(timer);
  if (on) timer = setInterval(tick, 650);
  changed();
}

function tick() {
  const branch = current();
  if (!branch) return play(false);
  if (state.selected < branch.tokens.length - 1) select(state.selected + 1);
  else if (!isRunning(branch)) play(false);
  return undefined;
}
