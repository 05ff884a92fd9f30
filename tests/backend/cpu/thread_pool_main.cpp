// Test of the thread pool: every work item runs once, every phase after the previous one, and
// nothing is read of a job that is over. test_cpu_bits.py builds it with the thread sanitizer; each
// job is freed after it ran, so that a late read is detected.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "thread_pool.h"

using namespace verbatim;

struct Sums : ThreadPool::Job {
    std::vector<std::vector<long>> cells;
    std::vector<int> items;
    long seed = 0;
    bool jitter = false;
    void phase(int p, ThreadPool::WorkItems& u) override {
        for (int i = u.next(), j; i >= 0; i = j) {
            j = u.next();
            long s = seed;
            if (p)
                for (long v : cells[p - 1])
                    s += v;  // all writes of the previous phase must be visible
            cells[p][i] = s + i;
            if (jitter && (rand() & 1023) == 0)
                std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
    }
};
int main(int argc, char** argv) {
    if (argc < 3) return 2;
    int threads = atoi(argv[1]), steps = atoi(argv[2]);
    ThreadPool pool(threads);
    for (int s = 0; s < steps; s++) {
        Sums* w = new Sums;
        w->seed = s;
        w->jitter = s % 3 == 0;
        int n = 1 + s % 7 + (s % 100 == 99 ? 20 : 0);
        for (int p = 0; p < n; p++)
            w->items.push_back((s * 7 + p * 3) % 40), w->cells.emplace_back(w->items.back());
        pool.run(*w, w->items);
        long previous = 0;
        for (int p = 0; p < n; p++) {
            long sum = 0;
            for (int i = 0; i < w->items[p]; i++) {
                long expected = s + (p ? previous : 0) + i;
                if (w->cells[p][i] != expected) {
                    printf("wrong\n");
                    return 1;
                }
                sum += expected;
            }
            previous = sum;
        }
        delete w;
        std::vector<int> hit(s % 50);
        pool.parallel_for(s % 50, [&](int i, int) { hit[i]++; });
        for (int h : hit)
            if (h != 1) {
                printf("item done %d times\n", h);
                return 1;
            }
    }
    // The counters hold MAX_ITEMS items: the next phase must run after as many, in jobs of even and
    // odd epochs. One item more is rejected, before any of the job runs.
    for (int over = 0; over < 2; over++)
        for (int epoch = 0; epoch < 2; epoch++) {
            Sums w;
            w.items = {ThreadPool::MAX_ITEMS + over, 3};
            for (int count : w.items) w.cells.emplace_back(count, -1);
            bool rejected = false;
            try {
                pool.run(w, w.items);
            } catch (const std::length_error&) {
                rejected = true;
                pool.parallel_for(1, [](int, int) {});
            }
            if (rejected != (over == 1) || (w.cells[1][2] < 0) != rejected) {
                printf("%d items: rejected %d, next phase %ld\n", w.items[0], rejected,
                       w.cells[1][2]);
                return 1;
            }
        }
    // A thread may be late for the last job; destroying the pool must still wake it.
    for (int s = 0; s < std::min(6000, 100 * steps) / threads; s++) {
        ThreadPool brief(threads);
        brief.parallel_for(threads, [](int, int) {});
    }
    printf("ok %d threads %d steps\n", threads, steps);
}
