// The machine's limits, measured: bytes a second that threads can read, 8-bit multiply-adds a second that they can do.
//
// A library of two C functions, loaded by observe/roofline.py through ctypes. It shares nothing with the kernels: a limit should not be
// measured with the code that is judged by it.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace {

using Clock = std::chrono::steady_clock;
std::atomic<uint64_t> sink{0};  // keeps the compiler from dropping the work

// Every thread prepares, then all work together PASSES times. Seconds of the best pass: what others do meanwhile is no property of the machine.
constexpr int PASSES = 4;

template <class Prepare, class Work>
double together(int threads, Prepare prepare, Work work) {
    std::barrier gate(threads);
    std::vector<Clock::time_point> began(threads * PASSES), ended(threads * PASSES);
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++)
        team.emplace_back([&, t] {
            auto state = prepare();
            for (int pass = 0; pass < PASSES; pass++) {
                gate.arrive_and_wait();
                began[pass * threads + t] = Clock::now();
                sink += work(state);
                ended[pass * threads + t] = Clock::now();
            }
        });
    for (auto& member : team) member.join();
    double best = 1e30;
    for (int pass = 0; pass < PASSES; pass++) {  // from the first to begin to the last to end
        auto first = *std::min_element(&began[pass * threads], &began[pass * threads] + threads);
        auto last = *std::max_element(&ended[pass * threads], &ended[pass * threads] + threads);
        best = std::min(best, std::chrono::duration<double>(last - first).count());
    }
    return best;
}

// Memory of one thread, touched first by itself, in huge pages where the system gives them: otherwise the page table is what is measured.
struct Share {
    static constexpr size_t PAGE = 2 << 20;
    uint64_t* words;
    size_t count;
    explicit Share(size_t bytes) : count(bytes / PAGE * PAGE / 8) {
        words = static_cast<uint64_t*>(std::aligned_alloc(PAGE, count * 8));
        if (!words) std::abort();
#if defined(__linux__)
        madvise(words, count * 8, MADV_HUGEPAGE);
#endif
        for (size_t i = 0; i < count; i++) words[i] = i;
    }
    Share(Share&& other) noexcept : words(other.words), count(other.count) { other.words = nullptr; }
    ~Share() { std::free(words); }
};

typedef uint64_t Line __attribute__((vector_size(64)));

uint64_t read_words(const Share& share) {
    const Line* p = reinterpret_cast<const Line*>(share.words);
    Line a = p[0], b = p[1], c = p[2], d = p[3];
    constexpr size_t AHEAD = 64;  // lines: the hardware's own prefetch stops at page borders and would be the limit
    for (size_t i = 4; i + 4 <= share.count / 8; i += 4) {
        for (size_t j = 0; j < 4; j++) __builtin_prefetch(p + i + AHEAD + j);
        a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

// Each returns the operations it did (a multiply and an add are two), or 0 where the machine lacks the instruction.
constexpr int64_t ROUNDS = 100000;

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vnni"))) uint64_t vnni512(int64_t rounds) {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5), s[12];
    for (auto& x : s) x = _mm512_setzero_si512();
    for (int64_t i = 0; i < rounds; i++) {
        for (auto& x : s) x = _mm512_dpbusd_epi32(x, a, b);
        asm volatile("" : "+v"(a), "+v"(b));
    }
    alignas(64) int32_t lanes[16];
    uint64_t out = 0;
    for (auto& x : s) {
        _mm512_store_si512(lanes, x);
        for (int lane : lanes) out += lane;
    }
    return out;
}

__attribute__((target("avx2"))) uint64_t madd256(int64_t rounds) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1), s[6];
    for (auto& x : s) x = _mm256_setzero_si256();
    for (int64_t i = 0; i < rounds; i++) {
        for (auto& x : s) {
            x = _mm256_add_epi32(x, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));
            asm volatile("" : "+x"(a), "+x"(b));
        }
    }
    alignas(32) int32_t lanes[8];
    uint64_t out = 0;
    for (auto& x : s) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
        for (int lane : lanes) out += lane;
    }
    return out;
}

#if defined(VB_PROBE_AMX) && defined(__linux__)
__attribute__((target("amx-tile,amx-int8"))) uint64_t amx(int64_t rounds) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    alignas(64) static thread_local uint8_t ones[1024];
    std::memset(ones, 1, sizeof ones);
    _tile_loadconfig(&config);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    alignas(64) int32_t out[256];
    _tile_stored(0, out, 64);
    _tile_release();
    return static_cast<uint64_t>(out[0]);
}
bool amx_usable() {
    unsigned a, b, c, d;
    bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3;  // amx-tile and amx-int8
    return there && syscall(SYS_arch_prctl, 0x1023, 18) == 0;                    // Linux gives tiles only to those who ask
}
#endif
#elif defined(__aarch64__)
#if !defined(__clang__)
__attribute__((target("arch=armv8.2-a+dotprod")))
#elif !defined(__ARM_FEATURE_DOTPROD)
__attribute__((target("dotprod")))
#endif
uint64_t dotprod(int64_t rounds) {
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
    int32x4_t s[16];
    for (auto& x : s) x = vdupq_n_s32(0);
    for (int64_t i = 0; i < rounds; i++) {
        for (auto& x : s) x = vdotq_s32(x, a, b);
        asm volatile("" : "+w"(a), "+w"(b));
    }
    uint64_t out = 0;
    for (auto& x : s) out += vaddvq_s32(x);
    return out;
}
#endif

double rate(int threads, uint64_t (*work)(int64_t), int64_t rounds, double ops_a_round) {
    double seconds = together(threads, [] { return 0; }, [&](int) { return work(rounds); });
    return threads * rounds * ops_a_round / seconds;
}

}  // namespace

extern "C" {

// Bytes a second: `threads` threads read `bytes` together, each its own share, touched first by itself.
double verbatim_read(int threads, int64_t bytes) {
    size_t share = static_cast<size_t>(bytes) / threads / Share::PAGE * Share::PAGE;
    if (!share) return 0;
    double seconds = together(threads, [&] { return Share(share); }, read_words);
    return static_cast<double>(share) * threads / seconds;
}

// Operations a second with 8-bit factors and 32-bit sums, by the best instruction of this machine; 0 where none is known here.
double verbatim_int8(int threads) {
    double best = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    auto take = [&](double found) { best = found > best ? found : best; };
    if (__builtin_cpu_supports("avx2")) take(rate(threads, madd256, 4 * ROUNDS, 6 * 64.0));
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) take(rate(threads, vnni512, 4 * ROUNDS, 12 * 128.0));
#if defined(VB_PROBE_AMX) && defined(__linux__)
    if (amx_usable()) take(rate(threads, amx, ROUNDS, 4 * 32768.0));
#endif
#elif defined(__aarch64__)
#if defined(__linux__)
    if (!(getauxval(AT_HWCAP) & (1 << 20))) return 0;
#endif
    best = rate(threads, dotprod, 4 * ROUNDS, 16 * 32.0);
#endif
    return best;
}
}
