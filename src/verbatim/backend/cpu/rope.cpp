// Rotary angles in double precision with our own sine and cosine, so that no C library can change a bit.
#include <cmath>

#include "kernels.h"

namespace verbatim {

// position * inv_freq is reduced by multiples of pi/2 (three parts, fused), then Taylor polynomials on [-pi/4, pi/4]: error below 1e-15.
static void sincos(double a, double* s, double* c) {
    double n = (a * 0.63661977236758134308 + 6755399441055744.0) - 6755399441055744.0;  // round to nearest even
    double r = std::fma(n, -1.57079632679489655800e+00, a);
    r = std::fma(n, -6.12323399573676603587e-17, r);
    double z = r * r;
    double p = -7.6471637318198164759e-13;  // -1/15!
    p = std::fma(p, z, 1.6059043836821614599e-10);
    p = std::fma(p, z, -2.5052108385441718775e-08);
    p = std::fma(p, z, 2.7557319223985890653e-06);
    p = std::fma(p, z, -1.9841269841269841253e-04);
    p = std::fma(p, z, 8.3333333333333332177e-03);
    p = std::fma(p, z, -1.6666666666666665741e-01);
    double sine = std::fma(p * z, r, r);
    double q = 4.7794773323873852974e-14;  // 1/16!
    q = std::fma(q, z, -1.1470745597729724714e-11);
    q = std::fma(q, z, 2.0876756987868098979e-09);
    q = std::fma(q, z, -2.7557319223985888276e-07);
    q = std::fma(q, z, 2.4801587301587301566e-05);
    q = std::fma(q, z, -1.3888888888888889419e-03);
    q = std::fma(q, z, 4.1666666666666664354e-02);
    q = std::fma(q, z, -0.5);
    double cosine = std::fma(q, z, 1.0);
    switch ((int64_t)n & 3) {
        case 0: *s = sine; *c = cosine; break;
        case 1: *s = cosine; *c = -sine; break;
        case 2: *s = -sine; *c = -cosine; break;
        default: *s = -cosine; *c = sine;
    }
}

void rope_angles(int64_t position, const double* inv_freq, int half, double factor, float* cosv, float* sinv) {
    for (int i = 0; i < half; i++) {
        double s, c;
        sincos((double)position * inv_freq[i], &s, &c);
        cosv[i] = (float)(c * factor);
        sinv[i] = (float)(s * factor);
    }
}

}  // namespace verbatim
