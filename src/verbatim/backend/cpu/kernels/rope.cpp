// Rotary embedding angles in double precision with our own sine and cosine, so that the bits do not
// depend on the C library.
#include "kernels.h"

namespace verbatim {

// The arithmetic of model/rope.py, operation by operation and unfused: the same angles as the
// reference backend (docs/numerics.md, Rotary positions).
static void sincos(double a, double* s, double* c) {
    constexpr double P1 = 0x1.921fb544p+0, P2 = 0x1.0b4611a6p-34, P3 = 0x1.3198a2e037073p-69;
    // The additions round a * 2/pi to the nearest even integer.
    double n = (a * (2.0 / 3.14159265358979323846) + 6755399441055744.0) - 6755399441055744.0;
    double x = ((a - n * P1) - n * P2) - n * P3, z = x * x;
    double p = 1.0 / 355687428096000.0;  // 1/17!
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    double sine = x + x * (z * p);
    double q = -1.0 / 6402373705728000.0;  // -1/18!
    q = q * z + 1.0 / 20922789888000.0;
    q = q * z - 1.0 / 87178291200.0;
    q = q * z + 1.0 / 479001600.0;
    q = q * z - 1.0 / 3628800.0;
    q = q * z + 1.0 / 40320.0;
    q = q * z - 1.0 / 720.0;
    q = q * z + 1.0 / 24.0;
    q = q * z - 1.0 / 2.0;
    double cosine = 1.0 + z * q;
    switch ((int64_t)n & 3) {
        case 0:
            *s = sine;
            *c = cosine;
            break;
        case 1:
            *s = cosine;
            *c = -sine;
            break;
        case 2:
            *s = -sine;
            *c = -cosine;
            break;
        default: *s = -cosine; *c = sine;
    }
}

void rope_angles(int64_t position, const double* inv_freq, int half, double factor, float* cosv,
                 float* sinv) {
    for (int i = 0; i < half; i++) {
        double s, c;
        sincos((double)position * inv_freq[i], &s, &c);
        cosv[i] = (float)(c * factor);
        sinv[i] = (float)(s * factor);
    }
}

}  // namespace verbatim
