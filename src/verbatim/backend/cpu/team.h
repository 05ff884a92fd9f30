// A team of threads that runs one function at a time, with cheap barriers inside it. Waiting threads spin for a moment, then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace verbatim {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    explicit Team(int threads) : size_(threads < 1 ? 1 : threads) {
        for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Team() {
        stop_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& w : workers_) w.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    void run(const std::function<void(int)>& fn) {
        fn_ = &fn;
        if (size_ > 1) {
            epoch_.fetch_add(1, std::memory_order_release);
            epoch_.notify_all();
        }
        fn(0);
        barrier();  // nobody may still use fn when run returns
    }

    // Every thread of the team must call it. What was written before is seen by all afterwards.
    void barrier() {
        if (size_ == 1) return;
        uint32_t g = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(g + 1, std::memory_order_release);
            generation_.notify_all();
            return;
        }
        spin(generation_, g, 4000);
    }

  private:
    static void spin(std::atomic<uint32_t>& value, uint32_t old, int turns) {
        for (int i = 0; i < turns; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
            relax();
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    }
    void work(int index) {
        uint32_t seen = 0;
        for (;;) {
            spin(epoch_, seen, 8000);  // about a third of a millisecond: the pause between two steps of one answer
            seen++;
            if (stop_.load()) return;
            (*fn_)(index);
            barrier();
        }
    }

    int size_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* fn_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace verbatim
