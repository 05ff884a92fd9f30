// The sampler's arithmetic (sampling/numerics.py) in JavaScript, bit for bit: IEEE additions,
// multiplications and divisions only. Math.exp and Math.log may differ between browsers, so the
// draw does not use them.

const view = new DataView(new ArrayBuffer(8));
const f64 = new Float64Array(view.buffer);
const u32 = new Uint32Array(view.buffer);
const HIGH = new Uint8Array(new Uint16Array([1]).buffer)[0] ? 1 : 0; // index of the upper word
const LOW = 1 - HIGH;

const LOG2E = 1.4426950408889634;
const LN2_HI = 0x162e42fee / 2 ** 33; // 32 significant bits: k * LN2_HI is exact
const LN2_LO = 1.9082149292705877e-10;
const ROUND = 6755399441055744; // 1.5 * 2^52: t + ROUND - ROUND rounds t, ties to even
const SQRT2_HI = 0x6a09e, SQRT2_LO = 0x667f3bcd; // mantissa bits of sqrt(2)
const EXP_FLOOR = -708;

const MASS_ONE = 2 ** 42; // the mass of the most likely token
const MASS_FLOOR = -30;

const EXP_TERMS = [
  6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1,
].map((f) => 1 / f);
const LOG_TERMS = [21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1].map((f) => 1 / f);

// e^x for x <= 0; 0 below -708
export function exp(x) {
  if (!(x >= EXP_FLOOR)) return 0;
  const k = x * LOG2E + ROUND - ROUND;
  const r = x - k * LN2_HI - k * LN2_LO;
  let p = EXP_TERMS[0];
  for (let i = 1; i < EXP_TERMS.length; i++) p = p * r + EXP_TERMS[i];
  f64[0] = p;
  u32[HIGH] = (u32[HIGH] + (k << 20)) >>> 0; // add k to the exponent
  return f64[0];
}

// natural logarithm of a positive normal number
export function log(x) {
  f64[0] = x;
  const high = u32[HIGH], low = u32[LOW], mantissa = high & 0xfffff;
  const upper = mantissa > SQRT2_HI || (mantissa === SQRT2_HI && low >= SQRT2_LO) ? 1 : 0;
  const k = (high >>> 20) - 1023 + upper;
  u32[HIGH] = mantissa | ((1023 - upper) << 20);
  const f = f64[0] - 1;
  const s = f / (2 + f);
  const z = s * s;
  let p = LOG_TERMS[0];
  for (let i = 1; i < LOG_TERMS.length; i++) p = p * z + LOG_TERMS[i];
  return k * LN2_HI + ((s + s) * p + k * LN2_LO);
}

// floor(e^d * 2^42) for d <= 0
export const massOf = (d) => (d > MASS_FLOOR ? Math.floor(exp(d) * MASS_ONE) : 0);

// floor(e^d * -d * 2^42): a token's term of the mean of -d
export const spreadOf = (d) => (d > MASS_FLOOR ? Math.floor(exp(d) * -d * MASS_ONE) : 0);

// An exact sum of masses, which may exceed 2^53: two partial sums of 21 bits and the rest.
export class ExactSum {
  high = 0;
  low = 0;
  add(mass, times = 1) {
    const high = Math.floor(mass / 2 ** 21);
    this.high += high * times;
    this.low += (mass - high * 2 ** 21) * times;
    return this;
  }
  addAll(masses) {
    for (let from = 0; from < masses.length; from += 1024) {
      const to = Math.min(from + 1024, masses.length);
      let sum = 0; // at most 1024 * 2^42 = 2^52: exact
      for (let i = from; i < to; i++) sum += masses[i];
      this.add(sum);
    }
    return this;
  }
  get value() {
    return BigInt(this.high) * 2097152n + BigInt(this.low);
  }
}

export const logMass = (total) => log(Number(total) / MASS_ONE);

// smallest mass that is at least `share` of `total` (both BigInt)
export function massNeeded(share, total) {
  const need = BigInt(Math.ceil(share * Number(total)));
  return need < 1n ? 1n : need > total ? total : need;
}

// log of a number in (0, 1]; subnormal numbers are rounded up to the smallest normal one
export const logOfShare = (share) => log(Math.max(share, 2 ** -1022));
