// A pool of threads that works through a list of phases. A phase is some units, taken one by one; it is over when its units are done, not
// when all threads have come: a thread that the system has put aside for a while holds up nobody, unless it was put aside inside a unit.
//
// So a thread may be late, even by whole steps. It reads nothing of a step before it holds one of its units, and a unit can only be taken by
// who knows the step's number: the counters carry it. Whoever holds a unit can rely on everything staying where it is until the unit is done.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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

class ThreadPool {
  public:
    // The units of a phase, as one thread takes them.
    class Units {
      public:
        const int thread;
        int next() {  // -1: no more
            int count;
            return next(1, count);
        }
        // The first of up to `most` units that follow one another.
        int next(int most, int& count) {
            if (at_ == end_ && !pool_.take(*this)) return count = 0, -1;
            const int first = at_;
            count = std::min(most, end_ - at_);
            at_ += count;
            taken_ += count;
            return first;
        }

      private:
        friend class ThreadPool;
        Units(ThreadPool& pool, int phase, int thread, uint32_t epoch) : thread(thread), pool_(pool), phase_(phase), epoch_(epoch) {}
        ThreadPool& pool_;
        const int phase_;
        int at_ = 0, end_ = 0, taken_ = 0;  // the units in hand; how many were given out
        const uint32_t epoch_;
        uint64_t seen_ = 0;  // the counter as this thread left it
    };
    struct Work {
        virtual void phase(int number, Units& units) = 0;  // takes units until there are no more
        virtual void drop() {}  // nobody wants the rest any more: what was started shall end soon
      protected:
        ~Work() = default;
    };

    explicit ThreadPool(int threads, int phases = 1) : size_(threads < 1 ? 1 : threads) {
        reserve(phases);
        for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { wait_for_work(i); });
    }
    ~ThreadPool() {
        stop_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& w : workers_) w.join();
    }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Runs all phases in order. What one phase wrote, every later one sees; what all wrote is seen by the caller.
    void perform(Work& work, const std::vector<int>& units) {
        settle();
        publish(work, units);
        play(0, epoch_.load(std::memory_order_relaxed));
    }

    // The same, while the caller does something else: the other threads begin alone. The caller comes to join() them, or the next work ends it.
    void start(Work& work, const std::vector<int>& units) {
        settle();
        publish(work, units);
        started_ = true;
    }
    void join() {
        started_ = false;
        play(0, epoch_.load(std::memory_order_relaxed));
    }
    void settle() {
        if (!started_) return;
        work_->drop();
        join();
    }

    // One phase of `units` calls of fn(unit, thread).
    void share(int units, const std::function<void(int, int)>& fn) {
        struct One : Work {
            const std::function<void(int, int)>& fn;
            explicit One(const std::function<void(int, int)>& f) : fn(f) {}
            void phase(int, Units& units) override {
                for (int u; (u = units.next()) >= 0;) fn(u, units.thread);
            }
        } one(fn);
        perform(one, {units});
    }

    // The unit that a thread begins a phase with, so that it can be prepared for; -1: not known.
    int first(int thread, int units) const { return thread < kept(units) ? thread * run(units) : -1; }

  private:
    static constexpr int COUNT_BITS = 20, KEPT = 16, SPINS = 4000;
    static constexpr uint32_t EPOCH_MASK = 0xffffff;
    struct alignas(64) Phase {
        std::atomic<uint64_t> next{0};  // step number (24 bits), which threads' first runs are taken (16), the next of the other units (24)
        std::atomic<uint32_t> done{0};  // step number (12 bits), units done (20)
    };

    static uint64_t fresh(uint32_t epoch, int index) { return (uint64_t)(epoch & EPOCH_MASK) << 40 | (uint64_t)index; }
    // Each thread begins with a run of its own, a quarter of its share, whose memory it has asked for. What is left is taken in pieces that become
    // smaller and smaller: few enough that taking them costs nothing, and at the end small enough that all end together.
    int kept(int units) const { return std::min({size_, KEPT, units}); }
    int run(int units) const { return std::max(1, units / (4 * size_)); }
    int piece(int left) const { return std::max(1, left / (2 * size_)); }

    void publish(Work& work, const std::vector<int>& units) {
        reserve((int)units.size());
        uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        work_ = &work;
        count_.store((int)units.size(), std::memory_order_relaxed);
        for (size_t p = 0; p < units.size(); p++) {
            Phase& phase = phases_[p];  // the step's number first: from then on nobody who is late can take a unit here
            phase.next.store(fresh(epoch, kept(units[p]) * run(units[p])), std::memory_order_relaxed);
            phase.done.store(epoch << COUNT_BITS, std::memory_order_relaxed);
            units_[p].store(units[p], std::memory_order_release);
        }
        epoch_.store(epoch, std::memory_order_release);
        if (size_ > 1) epoch_.notify_all();
    }

    // More phases than ever before: the threads must be out of the old ones.
    void reserve(int phases) {
        if (phases <= capacity_) return;
        for (auto& idle : idle_)
            for (uint32_t e = epoch_.load(), i; (i = idle.load(std::memory_order_acquire)) != e;) idle.wait(i, std::memory_order_acquire);
        if (idle_.empty()) idle_ = std::vector<std::atomic<uint32_t>>(size_ - 1);
        phases_ = std::make_unique<Phase[]>(phases);
        units_ = std::make_unique<std::atomic<int>[]>(phases);
        capacity_ = phases;
    }

    // Its own run first; then a piece of the others, in order; last a run that nobody began. False: there is nothing left.
    bool take(Units& mine) {
        const int units = units_[mine.phase_].load(std::memory_order_acquire), own = kept(units), run = this->run(units), thread = mine.thread;
        std::atomic<uint64_t>& next = phases_[mine.phase_].next;
        // Not loaded first: a guess that is mostly right takes the line from the other threads once, not twice.
        uint64_t word = mine.seen_ ? mine.seen_ : fresh(mine.epoch_, own * run);
        for (bool sure = false;;) {
            if (word >> 40 != (mine.epoch_ & EPOCH_MASK)) return false;
            const uint32_t begun = (uint32_t)(word >> 24) & 0xffff;
            const int index = (int)(word & 0xffffff);
            int whose = -1, count = run;
            if (thread < own && !(begun >> thread & 1)) whose = thread;
            else if (index < units) count = piece(units - index);
            else if (begun != (1u << own) - 1) whose = __builtin_ctz(~begun);
            else if (sure || !units) return false;
            else count = 0;
            const int first = whose < 0 ? index : whose * run;
            mine.seen_ = whose < 0 ? word + (uint64_t)count : word | (uint64_t)1 << (24 + whose);
            if (next.compare_exchange_strong(word, mine.seen_, std::memory_order_acq_rel, std::memory_order_acquire)) {
                mine.at_ = first;
                mine.end_ = first + count;
                return count > 0;
            }
            sure = true;
        }
    }

    void play(int thread, uint32_t epoch) {
        const int count = count_.load(std::memory_order_relaxed);
        for (int p = 0; p < count; p++) {
            Units units(*this, p, thread, epoch);
            if (take(units)) {
                work_->phase(p, units);
                finish(p, epoch, units.taken_);
            }
            if (!over(p, epoch)) return;
        }
    }

    void finish(int p, uint32_t epoch, int taken) {
        Phase& phase = phases_[p];
        uint32_t whole = epoch << COUNT_BITS | (uint32_t)units_[p].load(std::memory_order_relaxed);
        if (phase.done.fetch_add((uint32_t)taken, std::memory_order_acq_rel) + (uint32_t)taken == whole) phase.done.notify_all();
    }

    // Waits for the phase's end; false if the whole step is long over.
    bool over(int p, uint32_t epoch) {
        Phase& phase = phases_[p];
        const uint32_t whole = epoch << COUNT_BITS | (uint32_t)units_[p].load(std::memory_order_relaxed);
        for (int i = 0;; i++) {
            uint32_t done = phase.done.load(std::memory_order_acquire);
            if (done == whole) return true;
            if (done >> COUNT_BITS != (epoch & 0xfff)) return false;
            if (i < SPINS) relax();
            else phase.done.wait(done, std::memory_order_acquire);
        }
    }

    void wait_for_work(int index) {
        for (uint32_t seen = 0;;) {
            for (int i = 0; i < 2 * SPINS && epoch_.load(std::memory_order_acquire) == seen; i++) relax();  // the pause between two steps of one answer
            if (stop_.load()) return;  // it may have been said while the last step was read: then nobody will wake us again
            epoch_.wait(seen, std::memory_order_acquire);
            if (stop_.load()) return;
            seen = epoch_.load(std::memory_order_acquire);
            play(index, seen);
            idle_[index - 1].store(seen, std::memory_order_release);
            idle_[index - 1].notify_all();
        }
    }

    const int size_;
    int capacity_ = 0;
    std::unique_ptr<Phase[]> phases_;
    std::unique_ptr<std::atomic<int>[]> units_;  // of each phase; apart from the counters, because all read and none writes
    std::vector<std::atomic<uint32_t>> idle_;  // the last step that each worker has left
    std::atomic<int> count_{0};
    Work* work_ = nullptr;
    bool started_ = false;  // and not yet joined; the caller's alone
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::vector<std::thread> workers_;
};

}  // namespace verbatim
