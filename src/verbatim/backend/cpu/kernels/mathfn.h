// exp, tanh, erf and the activation functions on native vectors. Polynomials with a fixed order of
// fused multiply-adds: the same bits on every instruction set.
#pragma once
#include "vec.h"

namespace VB_NS {

// e^x within 2 units in the last place; exactly 1 at 0; 0 below -87.3; inputs above 88 are clamped.
static inline vf vexp(vf x) {
    const vf low = set1(-87.33654f);
    vm under = lt(x, low);
    x = vmin(vmax(x, low), set1(88.0f));
    vi n = toint(mul(x, set1(1.44269504088896341f)));
    vf f = tofloat(n);
    vf r = fma(f, set1(-0.693359375f), x);
    r = fma(f, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    vf s = bits(shl<23>(iadd(n, iset1(127))));
    return select(under, set1(0.0f), mul(p, s));
}

static inline vf vneg(vf x) { return sub(set1(0.0f), x); }
static inline vf copysign_from(vf mag, vf x) { return select(lt(x, set1(0.0f)), vneg(mag), mag); }

static inline vf vtanh(vf x) {
    vf a = vabs(x), t = mul(x, x);
    vf e = vexp(mul(a, set1(2.0f)));
    vf big = copysign_from(sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))), x);
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, t, set1(2.06390887954e-2f));
    p = fma(p, t, set1(-5.37397155531e-2f));
    p = fma(p, t, set1(1.33314422036e-1f));
    p = fma(p, t, set1(-3.33332819422e-1f));
    vf small = fma(mul(p, t), x, x);
    return select(lt(a, set1(0.625f)), small, big);
}

// erf by Abramowitz and Stegun 7.1.26: absolute error below 2e-7.
static inline vf verf(vf x) {
    vf a = vabs(x);
    vf t = div(set1(1.0f), fma(set1(0.3275911f), a, set1(1.0f)));
    vf p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    vf y = sub(set1(1.0f), mul(mul(p, t), vexp(vneg(mul(a, a)))));
    return copysign_from(y, x);
}

static inline vf vsilu(vf x) { return div(x, add(set1(1.0f), vexp(vneg(x)))); }
static inline vf vgelu(vf x) {
    return mul(mul(set1(0.5f), x), add(set1(1.0f), verf(mul(x, set1(0.70710678118654752f)))));
}
static inline vf vgelu_tanh(vf x) {
    vf u = mul(set1(0.79788456080286536f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), vtanh(u)));
}

static inline vf vrelu2(vf x) {
    x = vmax(x, set1(0.0f));
    return mul(x, x);
}
// The gated activation of gpt_oss; the limit and the factor are the same in all its models.
static inline vf vswiglu_oai(vf gate, vf up) {
    const vf limit = set1(7.0f);
    gate = vmin(gate, limit);
    up = vmax(vmin(up, limit), set1(-7.0f));
    vf sigmoid = div(set1(1.0f), add(set1(1.0f), vexp(mul(gate, set1(-1.702f)))));
    return mul(mul(gate, sigmoid), add(up, set1(1.0f)));
}

}  // namespace VB_NS
