// Temperature to token (sampling/filters.py, sampling/pipeline.py) in JavaScript, bit for bit.
//
// In: a Row, that is the logits after bias, masks and penalties, and settings. Out: every stage
// with what it kept, and the drawn token. A Row holds the 256 most likely ids and a histogram of
// the rest (the tail). `undecided` says why these cannot decide the draw; the page then requests
// the whole row. A result without `undecided` is exact.

import { allNoise, chance, keyFromHex } from "./noise.js";
import { ExactSum, exp, logMass, logOfShare, massNeeded, massOf, spreadOf } from "./numerics.js";

const EDGE = 1e-9; // logits; a bin's bounds are widened by it against rounding
const LEADERS = 6; // candidates of largest score in a result
const SHOWN = 6; // most likely candidates in a result

export class Row {
  // `data`: the answer of /lens/api/step
  constructor(data) {
    this.data = data;
    this.position = data.position;
    this.vocab = data.vocab;
    this.key = keyFromHex(data.key);
    this.sigma = data.sigma;
    this.tail = data.tail.count ? data.tail : null;
    this.ids = Int32Array.from(data.top, (c) => c[0]);
    this.logits = Float64Array.from(data.top, (c) => c[2]);
    this._noise = null;
    if (data.row) this.fill(data.row, data.row_type);
  }

  get whole() {
    return this.tail === null;
  }

  // every live logit, from base64
  fill(text, type) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const all = Float64Array.from(
      type === "f4" ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer),
    );
    const ids = [];
    for (let id = 0; id < all.length; id++) if (all[id] > -Infinity) ids.push(id);
    ids.sort((a, b) => all[b] - all[a] || a - b);
    this.ids = Int32Array.from(ids);
    this.logits = Float64Array.from(ids, (id) => all[id]);
    this.tail = null;
  }

  // the noise of every id under a key; the last key is kept
  noise(key = this.key) {
    if (this._noise?.key !== key) {
      const values = allNoise(key, this.position, this.vocab);
      let most = -Infinity, beyond = most; // the largest noise; of an id that is no candidate
      const known = new Set(this.tail ? this.ids : []);
      for (let id = 0; id < this.vocab; id++) {
        if (values[id] > most) most = values[id];
        if (values[id] > beyond && !known.has(id)) beyond = values[id];
      }
      this._noise = { key, values, most, beyond };
    }
    return this._noise;
  }
}

class Live {
  // the candidates that are still alive, most likely first, and whether the tail is
  constructor(row, temperature) {
    this.row = row;
    const peak = row.logits[0], n = row.ids.length;
    this.d = new Float64Array(n);
    for (let i = 0; i < n; i++) this.d[i] = (row.logits[i] - peak) / temperature;
    this.order = sortTies(this.d, row.ids);
    this.tail = row.tail;
    this.temperature = temperature;
    this.edge = this.tail ? (this.tail.best - peak) / temperature : -Infinity;
    this.undecided = null;
    this._masses = this._totals = null;
  }

  get left() {
    return this.order.length + (this.tail ? this.tail.count : 0);
  }

  get best() {
    return this.d[this.order[0]];
  }

  masses() {
    // of the live candidates, relative to the best of them
    if (this._masses === null) {
      const { best, d, order } = this;
      const masses = (this._masses = new Float64Array(order.length));
      for (let at = 0; at < order.length; at++) masses[at] = massOf(d[order[at]] - best);
    }
    return this._masses;
  }

  // [lower, upper] bound of the total mass; equal unless the tail is alive
  totals() {
    if (this._totals) return this._totals;
    const known = new ExactSum().addAll(this.masses()).value;
    if (!this.tail) return (this._totals = [known, known]);
    const { start, width, counts } = this.tail, peak = this.row.logits[0];
    const low = new ExactSum(), up = new ExactSum();
    counts.forEach((count, bin) => {
      if (!count) return;
      const from = start + bin * width - EDGE, to = Math.min(from + width + 2 * EDGE, this.tail.best);
      low.add(massOf(Math.min((from - peak) / this.temperature, 0)), count);
      up.add(massOf(Math.min((to - peak) / this.temperature, 0)), count);
    });
    return (this._totals = [known + low.value, known + up.value]);
  }

  keepFirst(count) {
    if (this.tail && !(this.d[this.order[count - 1]] > this.edge)) return false;
    this.order = this.order.subarray(0, count);
    if (this._masses) this._masses = this._masses.subarray(0, count);
    this.dropTail();
    return true;
  }

  keep(indices) {
    this.order = indices;
    this._masses = this._totals = null;
  }

  dropTail() {
    this.tail = this._totals = null;
  }
}

// A redraw samples a row several times at one temperature: compute their common part once.
function liveAt(row, temperature) {
  const known = row._live;
  if (known?.temperature !== temperature || known.tail !== row.tail) (row._live = new Live(row, temperature)).totals();
  return Object.assign(Object.create(Live.prototype), row._live);
}

// Dividing by the temperature may make two logits equal; a tie goes to the lower id.
function sortTies(d, ids) {
  const order = new Int32Array(d.length);
  for (let i = 0; i < d.length; i++) order[i] = i;
  for (let i = 1; i < d.length; i++) {
    if (d[i] !== d[i - 1] || ids[i] > ids[i - 1]) continue;
    let from = i - 1, to = i + 1;
    while (from > 0 && d[from - 1] === d[i]) from--;
    while (to < d.length && d[to] === d[i]) to++;
    order.set([...order.subarray(from, to)].sort((a, b) => ids[a] - ids[b]), from);
    i = to - 1;
  }
  return order;
}

// number of leading masses whose sum is at least `need`; 0: all of them are too few
function prefix(masses, need) {
  const sum = new ExactSum();
  let rough = 0;
  const wanted = Number(need);
  for (let i = 0; i < masses.length; i++) {
    sum.add(masses[i]);
    rough += masses[i];
    if (rough > wanted * 0.999999 && sum.value >= need) return i + 1;
  }
  return 0;
}

// One function per filter, in the order in which they run; false: the filter is off.
const STAGES = {
  top_k(live, { top_k }) {
    if (!(top_k > 0 && top_k < live.left)) return false;
    if (top_k > live.order.length || !live.keepFirst(top_k))
      live.undecided = `top_k ${top_k} reaches beyond the candidates`;
    return true;
  },
  top_p(live, { top_p }) {
    if (!(top_p < 1)) return false;
    const masses = live.masses();
    const [few, many] = live.totals().map((total) => prefix(masses, massNeeded(top_p, total)));
    if (!few || few !== many || !live.keepFirst(few))
      live.undecided = `top_p ${top_p} reaches beyond the candidates`;
    return true;
  },
  min_p(live, { min_p }) {
    if (!(min_p > 0)) return false;
    const best = live.best, floor = logOfShare(min_p);
    if (live.tail && live.edge - best >= floor) live.undecided = `min_p ${min_p} keeps more`;
    else live.dropTail();
    const end = live.order.findIndex((i) => live.d[i] - best < floor);
    if (end > 0) live.keep(live.order.subarray(0, end));
    return true;
  },
  typical_p(live, { typical_p }) {
    if (!(typical_p < 1)) return false;
    if (live.tail) {
      live.undecided = "typical_p needs every logit";
      return true;
    }
    const best = live.best, { ids } = live.row;
    const [total] = live.totals();
    const sum = new ExactSum();
    for (const i of live.order) sum.add(spreadOf(live.d[i] - best));
    const mean = Number(sum.value) / Number(total);
    const far = (i) => Math.abs(-(live.d[i] - best) - mean);
    const nearest = [...live.order].sort((a, b) => far(a) - far(b) || ids[a] - ids[b]);
    const masses = nearest.map((i) => massOf(live.d[i] - best));
    const count = prefix(masses, massNeeded(typical_p, total)) || nearest.length;
    const kept = new Set(nearest.slice(0, count));
    live.keep(live.order.filter((i) => kept.has(i)));
    return true;
  },
  top_n_sigma(live, { top_n_sigma }) {
    if (!(top_n_sigma > 0)) return false;
    const { logits, sigma } = live.row, floor = -(top_n_sigma * sigma);
    const near = (logit) => logit - logits[0] >= floor;
    if (live.tail && near(live.tail.best)) live.undecided = "top_n_sigma keeps more";
    else live.dropTail();
    const kept = live.order.filter((i) => near(logits[i]));
    live.keep(kept.length ? kept : live.order.subarray(0, 1));
    return true;
  },
  xtc_probability(live, { xtc_probability, xtc_threshold }, key) {
    if (!(xtc_probability > 0)) return false;
    if (!(chance(key, live.row.position) < xtc_probability)) return true;
    const masses = live.masses();
    const [few, many] = live.totals().map((total) => {
      const floor = xtc_threshold * Number(total);
      let count = 0;
      while (count < masses.length && masses[count] >= floor) count++;
      return live.tail && massOf(live.edge - live.best) >= floor ? -1 : count;
    });
    if (few !== many || few < 0) live.undecided = "XTC needs every logit";
    else if (few > 1) live.keep(live.order.subarray(few - 1));
    return true;
  },
};

export const FILTERS = Object.keys(STAGES);

export const DEFAULTS = {
  temperature: 1, top_k: 0, top_p: 1, min_p: 0, typical_p: 1, top_n_sigma: 0,
  xtc_probability: 0, xtc_threshold: 0.1,
};

// Sample one row. Returns {token, stages, kept, leaders, undecided, ...}; see the head of this file.
// A stage's `order` are its candidates, the most likely first; `share` is the probability of one of
// them after the temperature.
export function sample(row, settings, key = row.key) {
  const wanted = { ...DEFAULTS, ...settings };
  if (wanted.temperature === 0) {
    const [best, next] = row.logits;
    return {
      token: row.ids[0], greedy: true, stages: [], undecided: null,
      kept: [{ id: row.ids[0], probability: 1, noise: null, score: best }],
      lead: next === undefined ? null : best - next, left: 1,
    };
  }
  const live = liveAt(row, wanted.temperature), { best, d } = live;
  const middle = ([low, up]) => (low === up ? low : (low + up) / 2n);
  const all = middle(live.totals()), norm = logMass(all), exact = !row.tail;
  const stages = [{ name: "temperature", left: live.left, removed: 0, mass: 1, order: live.order }];
  for (const name of FILTERS) {
    const { left } = live;
    if (!STAGES[name](live, wanted, key)) continue;
    const mass = (Number(middle(live.totals())) * exp(live.best - best)) / Number(all);
    stages.push({ name, left: live.left, removed: left - live.left, mass, exact, order: live.order });
    if (live.undecided) break;
  }
  const share = (i) => ({ id: row.ids[i], share: exp(d[i] - best - norm) });
  return { ...draw(row, live, key, logMass(middle(live.totals()))), stages, share };
}

function draw(row, { best, d, order, tail, edge, left, undecided }, key, norm) {
  const { values, most, beyond } = row.noise(key);
  const at = (i) => {
    const id = row.ids[i], noise = values[id];
    return { id, noise, score: d[i] + noise, probability: exp(d[i] - best - norm) };
  };
  let leaders = [];
  for (let place = 0; place < order.length; place++) {
    const i = order[place], floor = leaders[LEADERS - 1]?.score ?? -Infinity;
    if (d[i] + most < floor) break; // no later one has more
    if (d[i] + values[row.ids[i]] < floor) continue;
    leaders.push(at(i));
    leaders = leaders.sort((a, b) => b.score - a.score || a.id - b.id).slice(0, LEADERS);
  }
  const [first, second] = leaders;
  const sure = (c) => !tail || c?.score > edge + beyond;
  if (!undecided && !sure(first)) undecided = "an id beyond the candidates may have more noise";
  return {
    token: first.id, greedy: false, undecided, leaders, left, score: first.score,
    kept: Array.from(order.subarray(0, SHOWN), at),
    lead: second && sure(second) ? first.score - second.score : null,
  };
}
