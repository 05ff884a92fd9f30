// Measures the machine's limits: memory read bandwidth and int8 multiply-add throughput.
//
// A library of two C functions, loaded by observe/roofline.py through ctypes. It shares no code
// with the kernels, because a limit must not be measured with the code that is compared with it.
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

// Each thread runs prepare() once, then all run work() concurrently, PASSES times. Returns the
// seconds of the fastest pass, because interruptions by other programs are not a limit of the
// machine.
constexpr int PASSES = 4;

template <class Prepare, class Work>
double timed_passes(int threads, Prepare prepare, Work work) {
    std::barrier gate(threads);
    std::vector<Clock::time_point> began(threads * PASSES), ended(threads * PASSES);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; t++)
        pool.emplace_back([&, t] {
            auto state = prepare();
            for (int pass = 0; pass < PASSES; pass++) {
                gate.arrive_and_wait();
                began[pass * threads + t] = Clock::now();
                sink += work(state);
                ended[pass * threads + t] = Clock::now();
            }
        });
    for (auto& thread : pool) thread.join();
    double best = 1e30;
    for (int pass = 0; pass < PASSES; pass++) {  // from the first start to the last end
        auto first = *std::min_element(&began[pass * threads], &began[pass * threads] + threads);
        auto last = *std::max_element(&ended[pass * threads], &ended[pass * threads] + threads);
        best = std::min(best, std::chrono::duration<double>(last - first).count());
    }
    return best;
}

// Buffer of one thread. The thread touches it first, so that it is local memory. Huge pages,
// because page table walks would limit the measurement.
struct ThreadBuffer {
    static constexpr size_t PAGE = 2 << 20;
    uint64_t* words;
    size_t count;
    explicit ThreadBuffer(size_t bytes) : count(bytes / PAGE * PAGE / 8) {
        words = static_cast<uint64_t*>(std::aligned_alloc(PAGE, count * 8));
        if (!words) std::abort();
#if defined(__linux__)
        madvise(words, count * 8, MADV_HUGEPAGE);
#endif
        for (size_t i = 0; i < count; i++) words[i] = i;
    }
    ThreadBuffer(ThreadBuffer&& other) noexcept : words(other.words), count(other.count) {
        other.words = nullptr;
    }
    ~ThreadBuffer() { std::free(words); }
};

typedef uint64_t Line __attribute__((vector_size(64)));

uint64_t read_words(const ThreadBuffer& buffer) {
    const Line* p = reinterpret_cast<const Line*>(buffer.words);
    Line a = p[0], b = p[1], c = p[2], d = p[3];
    constexpr size_t PREFETCH_LINES = 64;  // the hardware prefetcher stops at page borders
    for (size_t i = 4; i + 4 <= buffer.count / 8; i += 4) {
        for (size_t j = 0; j < 4; j++) __builtin_prefetch(p + i + PREFETCH_LINES + j);
        a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

// int8 kernels: `rounds` rounds of independent multiply-adds on registers. The return value only
// keeps the compiler from removing the work.
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
    // Bits 24 and 25: amx-tile and amx-int8. Linux grants tiles only on request (arch_prctl).
    bool supported = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3;
    return supported && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
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

double rate(int threads, uint64_t (*work)(int64_t), int64_t rounds, double ops_per_round) {
    double seconds = timed_passes(threads, [] { return 0; }, [&](int) { return work(rounds); });
    return threads * rounds * ops_per_round / seconds;
}

}  // namespace

extern "C" {

// Bytes per second: `threads` threads read `bytes` in total, each its own buffer.
double verbatim_read(int threads, int64_t bytes) {
    size_t size = static_cast<size_t>(bytes) / threads / ThreadBuffer::PAGE * ThreadBuffer::PAGE;
    if (!size) return 0;
    double seconds = timed_passes(threads, [&] { return ThreadBuffer(size); }, read_words);
    return static_cast<double>(size) * threads / seconds;
}

// int8 operations per second with 32-bit accumulators, by the fastest instruction of this machine
// (a multiply and an add are two operations); 0 if no instruction is known.
double verbatim_int8(int threads) {
    double best = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    auto keep_best = [&](double found) { best = found > best ? found : best; };
    if (__builtin_cpu_supports("avx2")) keep_best(rate(threads, madd256, 4 * ROUNDS, 6 * 64.0));
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"))
        keep_best(rate(threads, vnni512, 4 * ROUNDS, 12 * 128.0));
#if defined(VB_PROBE_AMX) && defined(__linux__)
    if (amx_usable()) keep_best(rate(threads, amx, ROUNDS, 4 * 32768.0));
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
