// The pool of threads, tried by itself: every unit once, every phase after the one before, nothing read of a step that is over.
// Built with the thread sanitizer by test_cpu_bits.py; the work of a step is freed after it, so that a late reader would be seen.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "thread_pool.h"

using namespace verbatim;

struct Sums : ThreadPool::Work {
    std::vector<std::vector<long>> cells;
    std::vector<int> units;
    long seed = 0;
    bool jitter = false;
    std::atomic<int> dropped{0};
    void drop() override { dropped++; }
    void phase(int p, ThreadPool::Units& u) override {
        for (int i = u.next(), j; i >= 0; i = j) {
            j = u.next();
            long s = seed;
            if (p) for (long v : cells[p - 1]) s += v;   // everything of the phase before must be visible
            cells[p][i] = s + i;
            if (jitter && (rand() & 1023) == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
    }
};
int main(int argc, char** argv) {
    if (argc < 3) return 2;
    int threads = atoi(argv[1]), steps = atoi(argv[2]);
    ThreadPool pool(threads);
    for (int s = 0; s < steps; s++) {
        Sums* w = new Sums; w->seed = s; w->jitter = s % 3 == 0;
        int n = 1 + s % 7 + (s % 100 == 99 ? 20 : 0);
        for (int p = 0; p < n; p++) w->units.push_back((s * 7 + p * 3) % 40), w->cells.emplace_back(w->units.back());
        if (s % 5 == 3) {  // begun, and nobody comes for it: the next work ends it
            Sums* idle = new Sums; idle->cells.emplace_back(30);
            pool.start(*idle, {30});
            if (s % 2) pool.settle(); else pool.share(3, [](int, int) {});
            if (idle->dropped != 1) { printf("dropped %d times\n", idle->dropped.load()); return 1; }
            for (int i = 0; i < 30; i++) if (idle->cells[0][i] != i) { printf("wrong\n"); return 1; }
            delete idle;
        }
        if (s % 2) pool.perform(*w, w->units);
        else {
            pool.start(*w, w->units);
            if (s % 4) std::this_thread::sleep_for(std::chrono::microseconds(s % 200));
            pool.join();
        }
        long before = 0;
        for (int p = 0; p < n; p++) {
            long sum = 0;
            for (int i = 0; i < w->units[p]; i++) { long want = s + (p ? before : 0) + i; if (w->cells[p][i] != want) { printf("wrong\n"); return 1; } sum += want; }
            before = sum;
        }
        delete w;
        std::vector<int> hit(s % 50); pool.share(s % 50, [&](int i, int) { hit[i]++; });
        for (int h : hit) if (h != 1) { printf("unit done %d times\n", h); return 1; }
    }
    // A thread may come late to the last step; the pool's end must reach it all the same.
    for (int s = 0; s < 6000 / threads; s++) {
        ThreadPool brief(threads);
        brief.share(threads, [](int, int) {});
    }
    printf("ok %d threads %d steps\n", threads, steps);
}
