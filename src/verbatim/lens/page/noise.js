// The sampler's noise (sampling/draw.py) in JavaScript, bit for bit: Philox4x32-10 of (seed,
// position, token id), then Gumbel noise -log(-log u). It has no state, so any draw can be repeated.

import { log } from "./numerics.js";

const TOKEN = 0, XTC = 1, KEY = 2; // domains
const out = new Uint32Array(4);

function high(a, b) {
  // upper 32 bits of a 32 x 32 bit product
  const a1 = a >>> 16, a0 = a & 0xffff, b1 = b >>> 16, b0 = b & 0xffff;
  const middle = a1 * b0 + Math.floor((a0 * b0) / 65536);
  const cross = a0 * b1 + (middle % 65536);
  return (a1 * b1 + Math.floor(middle / 65536) + Math.floor(cross / 65536)) >>> 0;
}

function philox(c0, c1, c2, c3, k0, k1) {
  for (let round = 0; round < 10; round++) {
    const h0 = high(c0, 0xd2511f53), l0 = Math.imul(c0, 0xd2511f53);
    const h1 = high(c2, 0xcd9e8d57), l1 = Math.imul(c2, 0xcd9e8d57);
    c0 = (h1 ^ c1 ^ k0) >>> 0;
    c1 = l1 >>> 0;
    c2 = (h0 ^ c3 ^ k1) >>> 0;
    c3 = l0 >>> 0;
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

const words = (key) => [Number(key & 0xffffffffn), Number((key >> 32n) & 0xffffffffn)];
const unit = (low, up) => (up * 2 ** 20 + (low >>> 12) + 0.5) * 2 ** -52;

// the 64-bit noise key of one choice of a request, a BigInt
export function noiseKey(seed, choice = 0) {
  philox(choice >>> 0, 0, 0, KEY, ...words(BigInt(seed)));
  return BigInt(out[0]) | (BigInt(out[1]) << 32n);
}

export const keyFromHex = (hex) => BigInt("0x" + hex);

function uniform(key, position, id, domain = TOKEN) {
  const [k0, k1] = words(key);
  philox(id >>> 1, position >>> 0, Math.floor(position / 2 ** 32), domain, k0, k1);
  return id & 1 ? unit(out[2], out[3]) : unit(out[0], out[1]);
}

// the number that decides whether XTC acts at a position
export const chance = (key, position) => uniform(key, position, 0, XTC);

export const noiseOf = (key, position, id) => -log(-log(uniform(key, position, id)));

// the noise of ids 0 .. count-1: one Philox call makes two of them
export function allNoise(key, position, count) {
  const noise = new Float64Array(count);
  const [k0, k1] = words(key);
  const p1 = Math.floor(position / 2 ** 32);
  for (let id = 0; id < count; id += 2) {
    philox(id >>> 1, position >>> 0, p1, TOKEN, k0, k1);
    noise[id] = -log(-log(unit(out[0], out[1])));
    if (id + 1 < count) noise[id + 1] = -log(-log(unit(out[2], out[3])));
  }
  return noise;
}
