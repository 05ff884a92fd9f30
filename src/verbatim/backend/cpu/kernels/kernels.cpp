// The kernels, written on the vector layer. CMake compiles this file once per instruction set:
// VB_NS is the namespace, VB_ISA_* selects the vector layer. No standard library templates here:
// the linker could pick an inline function compiled for one instruction set in code for another.
#include "kernels.h"

#include "formats.h"
#if defined(VB_ISA_AMX)
#include "matmul_amx.inc"
#define VB_MM mm_amx
#define VB_MM_HALVES mm_vector
#elif defined(VB_ISA_I8MM)
#include "matmul_i8mm.inc"
#define VB_MM mm_i8mm
#define VB_MM_HALVES mm_i8mm
#else
#include "attend.inc"
#include "delta.inc"
#include "mathfn.h"
#include "matmul.inc"
#include "rowwise.inc"
#define VB_MM mm_quant
#define VB_MM_HALVES mm_quant
#endif
// The quantised formats in the order of Kind, from K_4 on.
#define VB_PRODUCTS                                                                               \
    VB_MM<F4>, VB_MM<F4M>, VB_MM<F5>, VB_MM<F5M>, VB_MM<F8>, VB_MM<F8W>, VB_MM<F4K>, VB_MM<F5K>, \
        VB_MM_HALVES<F6K>, VB_MM_HALVES<F3K>, VB_MM_HALVES<F2K>, VB_MM_HALVES<F8H>, VB_MM<F4I>,   \
        VB_MM<F4E>

namespace VB_NS {

using namespace verbatim;

#if defined(VB_VECTOR_KERNELS)
// A set of matrix instructions replaces the quantised products of its vector set and keeps the rest
// of it: compiling that again would double the build time.
static Kernels matrix_table() {
    constexpr decltype(&mm_vector<F4>) PRODUCTS[] = {VB_PRODUCTS};
    Kernels table = VB_VECTOR_KERNELS();
    table.name = VB_NAME;
    for (int i = 0; i < KINDS - K_4; i++) table.mm[K_4 + i] = PRODUCTS[i];
    return table;
}
static const Kernels& table() {
    static const Kernels TABLE = matrix_table();
    return TABLE;
}
#else
// Defined in sampler.cpp, which is compiled once per vector set too.
void sample_row(const float* logits, const float* chunk_maxes, int64_t vocab,
                const ::vb::SampleRow& row, ::vb::SampleOut& out);

static const Kernels TABLE = {
    VB_NAME,
    BYTE_BIAS,
    quantise,
    {mm_float<K_F32>, mm_float<K_F16>, mm_float<K_BF16>, VB_PRODUCTS},
    rms_norm,
    layer_norm,
    rope,
    gate,
    attend,
    combine,
    scale_out,
    add_rows,
    max_or_nan,
    softcap,
    store_half,
    store_q8,
    exps,
    sigmoids,
    convolve,
    delta,
    sample_row,
    softmax_topk,
};
static const Kernels& table() { return TABLE; }
#endif

}  // namespace VB_NS

namespace verbatim {
const Kernels& VB_GETTER() { return VB_NS::table(); }
}  // namespace verbatim
