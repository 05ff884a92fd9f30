// Attention over the paged KV cache: work items, tiles, and their combination.
//
// A query group is some rows of one sequence and one KV head. Its tiles of 128 positions are
// computed independently, each from the queries and the cache alone, and combined in order of
// position. With few query groups each tile becomes a work item of its own (split-K), and the
// thread that finishes the last tile of a group combines them: the same additions in the same
// order, so the same bits.
#include <algorithm>
#include <cstring>

#include "e4m3.h"
#include "engine.h"

namespace verbatim {

// Partial results of all splits of a cache group, in floats (256 MiB), at most. Every tile of every
// query has one, so a prefill chunk at the end of a long context would need gigabytes. Query groups
// beyond the limit are not split: they are long enough to occupy the threads.
constexpr int64_t MAX_PARTIAL_FLOATS = 1 << 26;

void Engine::plan_attention() {
    attend_items_.resize(groups_.size());
    query_groups_.resize(groups_.size());
    int64_t partial_floats = 0;
    size_t slots = 0;
    for (size_t g = 0; g < groups_.size(); g++) {
        auto& attend_items = attend_items_[g];
        auto& query_groups = query_groups_[g];
        attend_items.clear();
        query_groups.clear();
        if (groups_[g].kind != G_ATTENTION) continue;
        int window = groups_[g].window, kv_heads = groups_[g].kv_heads, vdim = groups_[g].vdim;
        int share = shape.heads / kv_heads, per = std::max(1, TARGET_QUERIES / share);
        for (size_t s = 0; s < step.sequences.size(); s++) {
            const Sequence& q = step.sequences[s];
            for (int r = 0; r < q.rows; r += per) {
                int n = std::min(per, q.rows - r);
                int64_t first = q.start + r, last = q.visible_end(first + n - 1) - 1;
                int64_t lo = window ? std::max<int64_t>(0, first - window + 1) : 0;
                for (int kv = 0; kv < kv_heads; kv++)
                    query_groups.push_back({(int)s, q.row0 + r, n, kv, (int)(lo / TILE),
                                            (int)(last / TILE) + 1, 0, 1});
            }
        }
        bool split = query_groups.size() < (size_t)8 * pool_.size();
        int64_t floats = 0;
        for (size_t c = 0; c < query_groups.size(); c++) {
            QueryGroup& ch = query_groups[c];
            int tiles = ch.tile1 - ch.tile0;
            const int64_t needed = (int64_t)tiles * ch.rows * share * (vdim + 2);
            const size_t items = attend_items.size() + tiles + (query_groups.size() - c);
            if (split && tiles > 1 && floats + needed <= MAX_PARTIAL_FLOATS &&
                items <= (size_t)ThreadPool::MAX_ITEMS) {
                ch.splits = tiles;
                ch.partial = floats;
                floats += needed;
                for (int t = ch.tile0; t < ch.tile1; t++)
                    attend_items.push_back({ch.seq, ch.row0, ch.rows, ch.kv, t, t + 1, (int)c});
            } else
                attend_items.push_back(
                    {ch.seq, ch.row0, ch.rows, ch.kv, ch.tile0, ch.tile1, (int)c});
        }
        // Longest first, so that the threads finish together.
        std::stable_sort(attend_items.begin(), attend_items.end(),
                         [](const AttendItem& a, const AttendItem& b) {
                             return (int64_t)(a.tile1 - a.tile0) * a.rows >
                                    (int64_t)(b.tile1 - b.tile0) * b.rows;
                         });
        partial_floats = std::max(partial_floats, floats);
        slots = std::max(slots, query_groups.size());
    }
    if (partials_.size() < (size_t)partial_floats * 4)
        partials_ = Pages((size_t)partial_floats * 4 + 256);
    if (splits_capacity_ < slots) {
        splits_done_ = std::make_unique<std::atomic<int>[]>(slots);
        splits_capacity_ = slots;
    }
}

void Engine::fill_tile(AttendTile& t, const Op& op, const AttendItem& item, int tile, int lo_all,
                       int hi_all) const {
    const Sequence& seq = step.sequences[item.seq];
    int group = layer_group_[op.layer];
    int share = shape.heads / groups_[group].kv_heads, window = groups_[group].window;
    int head_dim = groups_[group].head_dim, vdim = groups_[group].vdim;
    int64_t base = (int64_t)tile * TILE;
    int64_t from = std::max<int64_t>(base, lo_all), to = std::min<int64_t>(base + TILE, hi_all);
    t.first = (int)((from - base) / BLOCK);
    t.last = (int)((to - base + BLOCK - 1) / BLOCK);
    for (int b = t.first; b < t.last; b++) {
        const uint8_t* c = kv_slice(op.layer, seq.blocks[group][base / BLOCK + b], item.kv);
        size_t value_bytes = kv_type_ == KV_F16 ? 2 : 1;
        t.k[b] = c;
        t.v[b] = c + (size_t)head_dim * BLOCK * value_bytes;
        if (kv_type_ == KV_Q8) {
            t.kscale[b] = (const float*)(c + (size_t)(head_dim + vdim) * BLOCK);
            t.vscale[b] = t.kscale[b] + BLOCK;
        } else if (kv_type_ == KV_FP8) {
            t.kscale[b] = t.vscale[b] = E4M3_SCALES;
        }
    }
    const float* q = (const float*)buffers_[op.src]->f.data();
    t.nq = item.rows * share;
    for (int r = 0; r < item.rows; r++) {
        int64_t pos = seq.start + (item.row0 - seq.row0) + r;
        int64_t lo = window ? std::max<int64_t>(0, pos - window + 1) : 0;
        int l = (int)std::clamp<int64_t>(lo - base, 0, TILE),
            h = (int)std::clamp<int64_t>(seq.visible_end(pos) - base, 0, TILE);
        for (int g = 0; g < share; g++) {
            int i = r * share + g;
            t.q[i] = q + (int64_t)(item.row0 + r) * shape.heads * head_dim +
                     (int64_t)(item.kv * share + g) * head_dim;
            t.lo[i] = l;
            t.hi[i] = std::max(h, l);
        }
    }
}

// Divides by the softmax sums and writes [rows][share * head_dim] of this KV head; quantises at
// once where no block spans two heads.
void Engine::finish_rows(const Op& op, const AttendItem& item, float* o, float* m, float* l) {
    const Group& group = group_of(op);
    int share = shape.heads / group.kv_heads, hd = group.head_dim, width = shape.heads * hd;
    int vdim = group.vdim;
    Buffer& b = *buffers_[op.dst];
    if (op.sinks >= 0)  // a sink is one more position, after all others, whose value is zero
        for (int i = 0; i < item.rows * share; i++)
            kernels.combine(&m[i], &l[i], o + (int64_t)i * vdim,
                            vectors_[op.sinks][item.kv * share + i % share], 1.0f, zeros_.data(),
                            vdim);
    for (int r = 0; r < item.rows; r++) {
        float* y =
            (float*)b.f.data() + (int64_t)(item.row0 + r) * width + (int64_t)item.kv * share * hd;
        for (int g = 0; g < share; g++)
            kernels.scale_out(o + (int64_t)(r * share + g) * vdim, l[r * share + g], hd,
                              y + g * hd);
        if (b.has_quantised && share * hd % 32 == 0) {
            int64_t block = (int64_t)item.kv * share * hd / 32;
            kernels.quantise(
                y, share * hd,
                b.qr.at_block(b.qr.first_block(item.row0 + r, width / 32) + block * b.qr.group));
        }
    }
}

void Engine::attend_item(const Op& op, Worker& w, const AttendItem& item) {
    int group = layer_group_[op.layer], share = shape.heads / groups_[group].kv_heads,
        nq = item.rows * share, vdim = groups_[group].vdim;
    const Sequence& seq = step.sequences[item.seq];
    int window = groups_[group].window;
    int64_t first = seq.start + item.row0 - seq.row0;
    int lo = (int)(window ? std::max<int64_t>(0, first - window + 1) : 0),
        hi = (int)seq.visible_end(first + item.rows - 1);
    QueryGroup& query_group = query_groups_[group][item.query_group];
    float* run = (float*)w.run.data();  // running result: [nq][vdim], then m and l
    float *m = run + (int64_t)nq * vdim, *l = m + nq;
    AttendTile t;
    t.head_dim = groups_[group].head_dim;
    t.vdim = vdim;
    t.kv_type = kv_type_;
    t.scale = op.scale;
    t.softcap = op.softcap;
    t.scores = (float*)w.scores.data();
    t.wide = (float*)w.wide.data();
    // Split: store the partial result of this tile; the last thread to finish combines all.
    if (query_group.splits > 1) {
        int64_t size = (int64_t)nq * (vdim + 2);
        float* mine = (float*)partials_.data() + query_group.partial +
                      (int64_t)(item.tile0 - query_group.tile0) * size;
        fill_tile(t, op, item, item.tile0, lo, hi);
        t.o = mine;
        kernels.attend(t);
        for (int i = 0; i < nq; i++) {
            mine[(int64_t)nq * vdim + i] = t.m[i];
            // -1: the query sees no position of this tile.
            mine[(int64_t)nq * (vdim + 1) + i] = t.hi[i] > t.lo[i] ? t.l[i] : -1.0f;
        }
        if (splits_done_[item.query_group].fetch_add(1, std::memory_order_acq_rel) + 1 <
            query_group.splits)
            return;
        splits_done_[item.query_group].store(0, std::memory_order_relaxed);
        for (int i = 0; i < nq; i++) l[i] = -1.0f;
        for (int p = 0; p < query_group.splits; p++) {
            const float* part = (float*)partials_.data() + query_group.partial + (int64_t)p * size;
            const float *pm = part + (int64_t)nq * vdim, *pl = pm + nq;
            for (int i = 0; i < nq; i++) {
                if (pl[i] < 0) continue;
                if (l[i] < 0) {
                    std::memcpy(run + (int64_t)i * vdim, part + (int64_t)i * vdim, vdim * 4);
                    m[i] = pm[i];
                    l[i] = pl[i];
                } else
                    kernels.combine(&m[i], &l[i], run + (int64_t)i * vdim, pm[i], pl[i],
                                    part + (int64_t)i * vdim, vdim);
            }
        }
        finish_rows(op, item, run, m, l);
        return;
    }
    for (int i = 0; i < nq; i++) l[i] = -1.0f;
    t.o = (float*)w.o.data();
    for (int tile = item.tile0; tile < item.tile1; tile++) {
        fill_tile(t, op, item, tile, lo, hi);
        kernels.attend(t);
        for (int i = 0; i < nq; i++) {
            if (t.hi[i] <= t.lo[i]) continue;
            if (l[i] < 0) {
                std::memcpy(run + (int64_t)i * vdim, t.o + (int64_t)i * vdim, vdim * 4);
                m[i] = t.m[i];
                l[i] = t.l[i];
            } else
                kernels.combine(&m[i], &l[i], run + (int64_t)i * vdim, t.m[i], t.l[i],
                                t.o + (int64_t)i * vdim, vdim);
        }
    }
    finish_rows(op, item, run, m, l);
}

// Prefetches the first KV blocks of an item: the blocks of a short sequence are scattered, and the
// hardware prefetcher does not find them.
void Engine::prefetch_kv(const Op& op, const AttendItem& item) const {
    const Sequence& seq = step.sequences[item.seq];
    const auto& blocks = seq.blocks[layer_group_[op.layer]];
    int64_t last = seq.start + item.row0 - seq.row0 + item.rows - 1,
            first = (int64_t)item.tile0 * TILE / BLOCK;
    for (int64_t b = first; b <= last / BLOCK && b < first + 4; b++) {
        if (blocks[b] < 0) continue;
        const uint8_t* c = kv_slice(op.layer, blocks[b], item.kv);
        for (size_t i = 0; i < group_of(op).slice_bytes; i += 64) __builtin_prefetch(c + i, 0, 2);
    }
}

void Engine::attend(const Op& op, WorkItems& items) {
    auto& attend_items = attend_items_[layer_group_[op.layer]];
    for (int i = items.next(), j; i >= 0; i = j) {
        j = items.next();
        if (j >= 0) prefetch_kv(op, attend_items[j]);
        attend_item(op, *workers_[items.thread], attend_items[i]);
    }
}

}  // namespace verbatim
