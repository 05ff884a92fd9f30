// A thread pool that runs a job: a list of phases, each a number of work items that the threads
// claim. A phase ends when its items are done, not when every thread has arrived. A thread that the
// operating system has preempted therefore delays the job only if it holds a work item.
//
// So a thread may be late, even by several jobs. Every job has an epoch number, and the counters
// that items are claimed from carry it: a late thread cannot claim an item of a newer job, and it
// reads nothing of a job before it holds one of its items. The invariant: whatever a job refers to
// stays valid as long as a thread holds one of its items.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace verbatim {

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
  public:
    // The work items of one phase, as one thread claims them.
    class WorkItems {
      public:
        const int thread;
        int next() {  // -1: none left
            int count;
            return next(1, count);
        }
        // The first of up to `max_count` consecutive items; `count` is how many were claimed.
        int next(int max_count, int& count) {
            if (at_ == end_ && !pool_.claim(*this)) return count = 0, -1;
            const int first = at_;
            count = std::min(max_count, end_ - at_);
            at_ += count;
            taken_ += count;
            return first;
        }

      private:
        friend class ThreadPool;
        WorkItems(ThreadPool& pool, int phase, int thread, uint32_t epoch)
            : thread(thread), pool_(pool), phase_(phase), epoch_(epoch) {}
        ThreadPool& pool_;
        const int phase_;
        int at_ = 0, end_ = 0;  // claimed and not yet handed out: [at_, end_)
        int taken_ = 0;         // handed out so far
        const uint32_t epoch_;
        uint64_t counter_ = 0;  // the phase's counter as this thread left it; 0: not yet read
    };
    struct Job {
        virtual void phase(int number, WorkItems& items) = 0;  // works until items.next() is -1

      protected:
        ~Job() = default;
    };

    explicit ThreadPool(int threads, int phases = 1) : size_(threads < 1 ? 1 : threads) {
        reserve(phases);
        for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { worker_loop(i); });
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
    // Work items of one phase, at most: what the counter of completed items holds.
    static constexpr int COUNT_BITS = 20, MAX_ITEMS = (1 << COUNT_BITS) - 1;

    // Runs all phases in order; item_counts[p] is the number of items of phase p. Writes of one
    // phase are visible to every later phase, and all writes are visible to the caller.
    void run(Job& job, const std::vector<int>& item_counts) {
        publish(job, item_counts);
        run_phases(0, epoch_.load(std::memory_order_relaxed));
    }

    // One phase of `count` items: calls fn(item, thread) for each.
    void parallel_for(int count, const std::function<void(int, int)>& fn) {
        struct ParallelFor : Job {
            const std::function<void(int, int)>& fn;
            explicit ParallelFor(const std::function<void(int, int)>& f) : fn(f) {}
            void phase(int, WorkItems& items) override {
                for (int i; (i = items.next()) >= 0;) fn(i, items.thread);
            }
        } job(fn);
        run(job, {count});
    }

    // The item with which a thread starts a phase of `count` items, so that its weights can be
    // prefetched; -1: not known.
    int first_item(int thread, int count) const {
        return thread < reserved_runs(count) ? thread * run_length(count) : -1;
    }

  private:
    static constexpr int MAX_RESERVED = 16;
    static constexpr int SPINS = 4000;  // polls before a waiting thread sleeps
    static constexpr uint32_t EPOCH_MASK = 0xffffff;
    struct alignas(64) Phase {
        // epoch (24 bits) | bit per thread: its reserved run is claimed (16) | next item of the
        // shared rest (24)
        std::atomic<uint64_t> next{0};
        std::atomic<uint32_t> done{0};  // epoch (12 bits) | items done (20)
    };

    static uint64_t initial_counter(uint32_t epoch, int index) {
        return (uint64_t)(epoch & EPOCH_MASK) << 40 | (uint64_t)index;
    }
    // Guided scheduling. Each thread starts with a reserved run, a quarter of its share, whose
    // memory it has prefetched. The rest is claimed in chunks that shrink: few claims at first,
    // small chunks at the end, so that all threads finish together.
    int reserved_runs(int count) const { return std::min({size_, MAX_RESERVED, count}); }
    int run_length(int count) const { return std::max(1, count / (4 * size_)); }
    int chunk_length(int left) const { return std::max(1, left / (2 * size_)); }

    void publish(Job& job, const std::vector<int>& item_counts) {
        for (int count : item_counts)
            if (count > MAX_ITEMS)
                throw std::length_error("a phase of " + std::to_string(count) +
                                        " work items; the thread pool takes at most " +
                                        std::to_string(MAX_ITEMS));
        reserve((int)item_counts.size());
        uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        job_ = &job;
        phase_count_.store((int)item_counts.size(), std::memory_order_relaxed);
        for (size_t p = 0; p < item_counts.size(); p++) {
            const int count = item_counts[p];
            // The epoch is stored first: from then on a late thread cannot claim an item here.
            Phase& phase = phases_[p];
            phase.next.store(initial_counter(epoch, reserved_runs(count) * run_length(count)),
                             std::memory_order_relaxed);
            phase.done.store(epoch << COUNT_BITS, std::memory_order_relaxed);
            item_counts_[p].store(count, std::memory_order_release);
        }
        epoch_.store(epoch, std::memory_order_release);
        if (size_ > 1) epoch_.notify_all();
    }

    // Grows the phase arrays; first waits until every worker has left the old ones.
    void reserve(int phases) {
        if (phases <= capacity_) return;
        for (auto& finished : finished_epoch_)
            for (uint32_t e = epoch_.load(), i;
                 (i = finished.load(std::memory_order_acquire)) != e;)
                finished.wait(i, std::memory_order_acquire);
        if (finished_epoch_.empty())
            finished_epoch_ = std::vector<std::atomic<uint32_t>>(size_ - 1);
        phases_ = std::make_unique<Phase[]>(phases);
        item_counts_ = std::make_unique<std::atomic<int>[]>(phases);
        capacity_ = phases;
    }

    // Claims the thread's own reserved run, then chunks of the shared rest in order, and at last
    // reserved runs that their threads have not claimed. False: nothing is left.
    bool claim(WorkItems& items) {
        const int count = item_counts_[items.phase_].load(std::memory_order_acquire),
                  reserved = reserved_runs(count), run = run_length(count), thread = items.thread;
        std::atomic<uint64_t>& next = phases_[items.phase_].next;
        // The expected value is predicted, not loaded: a prediction that is mostly right moves the
        // cache line between cores once, not twice.
        uint64_t counter =
            items.counter_ ? items.counter_ : initial_counter(items.epoch_, reserved * run);
        for (bool loaded = false;;) {
            if (counter >> 40 != (items.epoch_ & EPOCH_MASK)) return false;
            const uint32_t claimed = (uint32_t)(counter >> 24) & 0xffff;
            const int index = (int)(counter & 0xffffff);
            int owner = -1, length = run;  // owner of the reserved run; -1: a chunk of the rest
            if (thread < reserved && !(claimed >> thread & 1)) owner = thread;
            else if (index < count) length = chunk_length(count - index);
            else if (claimed != (1u << reserved) - 1) owner = __builtin_ctz(~claimed);
            else if (loaded || !count) return false;
            else length = 0;  // nothing left by the prediction: exchange once to see the truth
            const int first = owner < 0 ? index : owner * run;
            items.counter_ =
                owner < 0 ? counter + (uint64_t)length : counter | (uint64_t)1 << (24 + owner);
            if (next.compare_exchange_strong(counter, items.counter_, std::memory_order_acq_rel,
                                             std::memory_order_acquire)) {
                items.at_ = first;
                items.end_ = first + length;
                return length > 0;
            }
            loaded = true;
        }
    }

    void run_phases(int thread, uint32_t epoch) {
        const int count = phase_count_.load(std::memory_order_relaxed);
        for (int p = 0; p < count; p++) {
            WorkItems items(*this, p, thread, epoch);
            if (claim(items)) {
                job_->phase(p, items);
                complete(p, epoch, items.taken_);
            }
            if (!wait_for_phase(p, epoch)) return;
        }
    }

    void complete(int p, uint32_t epoch, int taken) {
        Phase& phase = phases_[p];
        uint32_t all_done =
            epoch << COUNT_BITS | (uint32_t)item_counts_[p].load(std::memory_order_relaxed);
        if (phase.done.fetch_add((uint32_t)taken, std::memory_order_acq_rel) + (uint32_t)taken ==
            all_done)
            phase.done.notify_all();
    }

    // Waits for the end of the phase; false if the job is over and a newer one has begun.
    bool wait_for_phase(int p, uint32_t epoch) {
        Phase& phase = phases_[p];
        const uint32_t all_done =
            epoch << COUNT_BITS | (uint32_t)item_counts_[p].load(std::memory_order_relaxed);
        for (int i = 0;; i++) {
            uint32_t done = phase.done.load(std::memory_order_acquire);
            if (done == all_done) return true;
            if (done >> COUNT_BITS != (epoch & 0xfff)) return false;
            if (i < SPINS) cpu_relax();
            else phase.done.wait(done, std::memory_order_acquire);
        }
    }

    void worker_loop(int index) {
        for (uint32_t seen = 0;;) {
            // Spin over the short gap between two steps of a decode before sleeping.
            for (int i = 0; i < 2 * SPINS && epoch_.load(std::memory_order_acquire) == seen; i++)
                cpu_relax();
            // The pool may have been stopped while the last epoch was read; no wake-up would
            // follow.
            if (stop_.load()) return;
            epoch_.wait(seen, std::memory_order_acquire);
            if (stop_.load()) return;
            seen = epoch_.load(std::memory_order_acquire);
            run_phases(index, seen);
            finished_epoch_[index - 1].store(seen, std::memory_order_release);
            finished_epoch_[index - 1].notify_all();
        }
    }

    const int size_;
    int capacity_ = 0;
    std::unique_ptr<Phase[]> phases_;
    // Items per phase. Apart from the counters: every thread reads these lines, none writes them.
    std::unique_ptr<std::atomic<int>[]> item_counts_;
    std::vector<std::atomic<uint32_t>> finished_epoch_;  // the last epoch each worker has left
    std::atomic<int> phase_count_{0};
    Job* job_ = nullptr;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::vector<std::thread> workers_;
};

}  // namespace verbatim
