#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(VB_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace verbatim {

#if defined(__x86_64__)
static bool has_f16c() {  // a feature that clang 14 cannot ask for by name
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(VB_HAVE_AMX)
static bool amx_usable() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & (1u << 24)) || !(d & (1u << 25))) return false;  // amx-tile, amx-int8
    // Linux grants the AMX tile registers per process, on request (ARCH_REQ_XCOMP_PERM).
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

#if defined(__aarch64__) && defined(VB_HAVE_I8MM)
static bool i8mm_usable() {
#if defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found != 0;
#else
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#endif
}
#endif

std::vector<std::string> supported_isas() {
    std::vector<std::string> out{"scalar"};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        out.push_back("avx2");
    else return out;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
        out.push_back("avx512");
#if defined(VB_HAVE_AMX)
        if (amx_usable()) out.push_back("amx");
#endif
    }
#elif defined(__aarch64__)
#if defined(__APPLE__)
    out.push_back("neon");
#else
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) out.push_back("neon");
    else return out;
#endif
#if defined(VB_HAVE_I8MM)
    if (i8mm_usable()) out.push_back("i8mm");
#endif
#endif
    return out;
}

const Kernels& select_isa(const std::string& name) {
    auto have = supported_isas();
    std::string want = name.empty() || name == "auto" ? have.back() : name, list;
    bool found = false;
    for (auto& h : have) {
        found |= h == want;
        list += (list.empty() ? "" : ", ") + h;
    }
    if (!found)
        throw std::invalid_argument("instruction set " + want +
                                    " is not available on this machine; it has: " + list);
#if defined(__x86_64__)
    if (want == "avx2") return kernels_avx2();
    if (want == "avx512") return kernels_avx512();
#if defined(VB_HAVE_AMX)
    if (want == "amx") return kernels_amx();
#endif
#elif defined(__aarch64__)
    if (want == "neon") return kernels_neon();
#if defined(VB_HAVE_I8MM)
    if (want == "i8mm") return kernels_i8mm();
#endif
#endif
    return kernels_scalar();
}

}  // namespace verbatim
