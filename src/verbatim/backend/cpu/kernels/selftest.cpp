#include "selftest.h"

#include <cstring>
#include <memory>

#include "engine.h"

namespace verbatim {
namespace {

// splitmix64; the floats are multiples of 2^-23, so that generating them rounds nothing.
struct Noise {
    uint64_t s;
    uint64_t next() {
        uint64_t z = (s += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    float unit() { return (float)(int32_t)(next() >> 40) * 0x1p-23f - 1.0f; }
    std::vector<float> floats(size_t n, float scale) {
        std::vector<float> v(n);
        for (float& x : v) x = unit() * scale;
        return v;
    }
};

struct Hash {  // FNV-1a
    uint64_t h = 0xcbf29ce484222325ull;
    void bytes(const void* p, size_t n) {
        for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t*)p)[i]) * 0x100000001b3ull;
    }
    void floats(const float* p, size_t n) { bytes(p, n * 4); }
};

struct Format {
    const char* name;
    int values, bytes;
    int half[2];
};
const Format FORMATS[] = {
    {"f32", 1, 4, {-1, -1}},       {"f16", 1, 2, {0, -1}},      {"bf16", 1, 2, {-1, -1}},
    {"q4_0", 32, 18, {0, -1}},     {"q4_1", 32, 20, {0, 2}},    {"q5_0", 32, 22, {0, -1}},
    {"q5_1", 32, 24, {0, 2}},      {"q8_0", 32, 34, {0, -1}},   {"q8_k", 256, 292, {-1, -1}},
    {"q4_k", 256, 144, {0, 2}},    {"q5_k", 256, 176, {0, 2}},  {"q6_k", 256, 210, {208, -1}},
    {"q3_k", 256, 110, {108, -1}}, {"q2_k", 256, 84, {80, 82}}, {"q8_f", 32, 36, {-1, -1}},
    {"q8_h", 32, 40, {-1, -1}},    {"iq4_nl", 32, 18, {0, -1}}, {"iq4_xs", 256, 136, {0, -1}},
    {"mxfp4", 32, 17, {-1, -1}},
};

// Random blocks as in a file: any bits are valid quants, and scales are made small.
std::vector<uint8_t> blocks(const Format& t, Noise& noise, int64_t rows, int64_t k) {
    std::vector<uint8_t> out((size_t)(rows * k / t.values * t.bytes));
    for (uint8_t& b : out) b = (uint8_t)noise.next();
    for (size_t at = 0; at < out.size(); at += t.bytes) {
        for (int h : t.half)
            if (h >= 0) {
                uint16_t v = (uint16_t)(0x2000 | (noise.next() &
                                                  0x8fff));  // magnitude 0.008 to 0.03, either sign
                std::memcpy(&out[at + h], &v, 2);
            }
        float f = noise.unit() * 0.05f;
        if (!std::strcmp(t.name, "f32") || !std::strcmp(t.name, "q8_k") ||
            !std::strcmp(t.name, "q8_f") || !std::strcmp(t.name, "q8_h"))
            std::memcpy(&out[at], &f, 4);
        if (!std::strcmp(t.name, "q8_h")) {
            f = noise.unit() * 0.05f;
            std::memcpy(&out[at + 4], &f, 4);
        }
        if (!std::strcmp(t.name, "mxfp4")) out[at] = (uint8_t)(118 + (out[at] & 7));
        if (!std::strcmp(t.name, "bf16")) {
            uint32_t u;
            std::memcpy(&u, &f, 4);
            uint16_t v = (uint16_t)(u >> 16);
            std::memcpy(&out[at], &v, 2);
        }
    }
    return out;
}

Pages quantise_rows(const Kernels& k, const std::vector<float>& x, int rows, int width, bool fine,
                    QRows& q) {
    Pages pages = quant_pages(rows + ROW_GROUP, width, fine, q);
    q.group = row_group(rows);
    for (int r = 0; r < rows; r++)
        k.quantise(x.data() + (size_t)r * width, width, q.at_block(q.first_block(r, width / 32)));
    return pages;
}

uint64_t product(const Kernels& k, const Format& t, Noise noise, bool fine = false) {
    Hash hash;
    for (int width : {t.values == 1 ? 40 : t.values, t.values == 256 ? 512 : 96, 768}) {
        int n = 41, panels = (n + 15) / 16;
        auto file = blocks(t, noise, n, width);
        Packed w{};
        const SourceType& source = *source_type(t.name);
        w.kind = source.kind;
        w.n = n;
        w.k = width;
        w.panels = panels;
        w.panel_bytes = panel_bytes(w.kind, width);
        Pages pages((size_t)panels * w.panel_bytes + 8192);
        size_t row_bytes = (size_t)width / t.values * t.bytes;
        for (int p = 0; p < panels; p++)
            pack_panel(source, file.data() + p * 16 * row_bytes, row_bytes,
                       p * 16 + 16 <= n ? 16 : n - p * 16, width, k.byte_bias,
                       pages.data() + p * w.panel_bytes);
        w.data = pages.data();
        std::vector<float> row(width);
        unpack_row(w, n - 1, k.byte_bias, row.data());
        hash.floats(row.data(), width);
        for (int rows : {1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 33, 64}) {
            auto x = noise.floats((size_t)rows * width, 2.0f);
            Pages store;
            QRows q{};
            if (KIND[w.kind].quantised) store = quantise_rows(k, x, rows, width, fine, q);
            std::vector<float> out((size_t)rows * panels * 16);
            k.mm[w.kind](w, 0, panels, q, x.data(), nullptr, rows, out.data(), panels * 16,
                         nullptr);
            hash.floats(out.data(), out.size());
        }
    }
    return hash.h;
}

// A synthetic model of 2 layers (the second with a sliding window), prefilled in chunks; the digest
// covers the logits of every position.
uint64_t model(const Kernels& k, const Format& t, int threads, KvType kv_type,
               std::vector<int> chunks, int head_dim, bool fine = false) {
    Noise noise{77};
    int hidden = 256, heads = 6, kv = 2, inner = 512, vocab = 100, width = heads * head_dim;
    Engine e(k, threads, Shape{vocab, hidden, heads, kv, head_dim, A_SILU, false, 1e-5f}, kv_type,
             fine);
    e.add_group(0, {0}, G_ATTENTION, 0);
    e.add_group(45, {1}, G_ATTENTION, 0);
    auto mat = [&](int rows, int cols, int group) {
        bool fits = cols % t.values == 0;
        const Format& format = fits ? t : FORMATS[0];
        auto file = blocks(format, noise, rows, cols);
        return e.add_matrix(format.name, file.data(), (int64_t)file.size(), rows, cols, group);
    };
    auto vec = [&](int n) {
        auto v = noise.floats(n, 0.5f);
        for (float& x : v) x += 1.0f;
        return e.add_vector(v.data(), n);
    };
    std::vector<double> freq(head_dim / 2);
    for (size_t i = 0; i < freq.size(); i++) freq[i] = 1.0 / (double)(1 + i * i);
    int rope = e.add_rope(freq.data(), head_dim / 2, 1.0);
    int x = e.add_buffer(hidden), h = e.add_buffer(hidden), q = e.add_buffer(width),
        o = e.add_buffer(width), in = e.add_buffer(inner), lg = e.add_buffer(vocab);
    int embed = mat(vocab, hidden, 0);
    auto op = [](OpType type, int src, int dst) {
        Op p{};
        p.type = type;
        p.src = src;
        p.dst = dst;
        return p;
    };
    Op p = op(O_EMBED, -1, x);
    p.mat[0] = embed;
    e.add_op(p);
    for (int layer = 0; layer < 2; layer++) {
        p = op(O_QKV, x, q);
        p.norm = vec(hidden);
        p.layer = layer;
        p.rope = rope;
        p.qnorm = vec(head_dim);
        p.knorm = vec(head_dim);
        p.mat[0] = mat(width, hidden, head_dim);
        p.mat[1] = mat(kv * head_dim, hidden, head_dim);
        p.mat[2] = mat(kv * head_dim, hidden, head_dim);
        e.add_op(p);
        p = op(O_ATTEND, q, o);
        p.layer = layer;
        p.scale = 0.25f;
        p.softcap = layer ? 20.0f : 0.0f;
        e.add_op(p);
        p = op(O_LINEAR, o, x);
        p.add = true;
        p.mat[0] = mat(hidden, width, 0);
        e.add_op(p);
        p = op(O_GATEUP, x, in);
        p.norm = vec(hidden);
        p.mat[0] = mat(inner, hidden, 0);
        p.mat[1] = mat(inner, hidden, 0);
        e.add_op(p);
        p = op(O_LINEAR, in, x);
        p.add = true;
        p.mat[0] = mat(hidden, inner, 0);
        e.add_op(p);
    }
    p = op(O_NORM, x, h);
    p.norm = vec(hidden);
    p.outputs = true;
    e.add_op(p);
    p = op(O_HEAD, h, lg);
    p.mat[0] = embed;
    p.softcap = 30.0f;
    e.add_op(p);
    e.finish();
    e.allocate({32, 32});
    Hash hash;
    int64_t at = 0;
    std::vector<int32_t> tokens(400);
    for (int32_t& token : tokens) token = (int32_t)(noise.next() % vocab);
    for (int n : chunks) {
        Step& s = e.step;
        s = Step{};
        s.sequences.resize(1);
        s.sequences[0] = {0, n, at, {}};
        for (int g = 0; g < 2; g++) {
            std::vector<int32_t> table;
            for (int64_t b = 0; b * BLOCK < at + n; b++)
                table.push_back((int32_t)((b * 7 + 3 * g) % 32));
            s.sequences[0].blocks.push_back(table);
        }
        for (int i = 0; i < n; i++) {
            s.tokens.push_back(tokens[at + i]);
            s.positions.push_back((int32_t)(at + i));
            s.sequence.push_back(0);
            s.outputs.push_back(i);
            s.logits.push_back(i);
        }
        e.run();
        hash.floats(e.logits(), (size_t)n * vocab);
        at += n;
    }
    return hash.h;
}

uint64_t rowwise(const Kernels& k, Noise noise) {
    Hash hash;
    for (int n : {1, 5, 16, 31, 64, 100, 576}) {
        auto x = noise.floats(n, 3.0f), w = noise.floats(n, 1.0f), b = noise.floats(n, 1.0f);
        std::vector<float> y(n);
        k.rms_norm(x.data(), w.data(), n, 1e-5f, y.data());
        hash.floats(y.data(), n);
        k.layer_norm(x.data(), w.data(), b.data(), n, 1e-5f, y.data());
        hash.floats(y.data(), n);
        for (int a = 0; a < 3; a++) {
            k.gate(a, x.data(), w.data(), n, y.data());
            hash.floats(y.data(), n);
            k.gate(a, nullptr, x.data(), n, y.data());
            hash.floats(y.data(), n);
        }
        auto e = noise.floats(n, 100.0f);
        k.exps(e.data(), n, y.data());
        hash.floats(y.data(), n);
        k.softcap(e.data(), n, 30.0f);
        hash.floats(e.data(), n);
        std::vector<uint16_t> half(n);
        for (float scale : {1e-7f, 1e-4f, 1.0f, 1e5f}) {
            auto v = noise.floats(n, scale);
            k.store_half(v.data(), n, half.data());
            hash.bytes(half.data(), n * 2);
        }
        std::vector<int8_t> q(n);
        float s;
        k.store_q8(x.data(), n, q.data(), &s);
        hash.bytes(q.data(), n);
        hash.floats(&s, 1);
        std::vector<float> c(n), sn(n), freq;
        std::vector<double> f(n);
        for (int i = 0; i < n; i++) f[i] = (double)(noise.unit() + 1.0f);
        rope_angles(99991, f.data(), n, 1.0, c.data(), sn.data());
        auto two = noise.floats(2 * n, 1.0f);
        k.rope(two.data(), c.data(), sn.data(), n);
        hash.floats(two.data(), 2 * n);
    }
    return hash.h;
}

// Activations that are not in `rowwise`, whose digest is older.
uint64_t gates(const Kernels& k, Noise noise) {
    Hash hash;
    for (int n : {1, 5, 16, 31, 64, 100}) {
        auto g = noise.floats(n, 12.0f), up = noise.floats(n, 12.0f);
        std::vector<float> y(n);
        k.gate(A_RELU2, g.data(), up.data(), n, y.data());
        hash.floats(y.data(), n);
        k.gate(A_RELU2, nullptr, up.data(), n, y.data());
        hash.floats(y.data(), n);
        k.gate(A_SWIGLU_OAI, g.data(), up.data(), n, y.data());
        hash.floats(y.data(), n);
    }
    return hash.h;
}

// Replays and new updates of a strip of a delta net's state, twice: the second time in place.
uint64_t delta(const Kernels& k, Noise noise) {
    Hash hash;
    for (int rows : {1, 8, 33})
        for (int count : {1, 2, BLOCK}) {
            const int stride = 2 * DELTA_LANES;
            auto from = noise.floats((size_t)rows * stride, 1.0f),
                 kq = noise.floats((size_t)2 * rows * count, 1.0f),
                 v = noise.floats((size_t)stride * count, 1.0f);
            std::vector<float> state(rows * DELTA_LANES), out(stride * count);
            std::vector<DeltaUpdate> updates;
            for (int t = 0; t < count; t++)
                updates.push_back({&kq[2 * t * rows], &v[t * stride],
                                   t < count / 3 ? nullptr : &kq[(2 * t + 1) * rows],
                                   0.75f + noise.unit() / 4, 0.5f + noise.unit() / 2,
                                   &out[t * stride]});
            DeltaStrip strip{state.data(), rows, from.data(), stride, nullptr, nullptr};
            for (int turn = 0; turn < 2; turn++) {
                k.delta(strip, updates.data(), count, turn * DELTA_LANES);
                hash.floats(state.data(), state.size());
                strip.from = strip.state;
                strip.from_stride = DELTA_LANES;
            }
            hash.floats(out.data(), out.size());
        }
    return hash.h;
}

}  // namespace

std::vector<std::pair<std::string, uint64_t>> digests(const Kernels& k, int threads) {
    std::vector<std::pair<std::string, uint64_t>> out;
    for (const Format& t : FORMATS)
        out.emplace_back(std::string("product ") + t.name, product(k, t, Noise{1}));
    out.emplace_back("rowwise", rowwise(k, Noise{2}));
    out.emplace_back("gates", gates(k, Noise{3}));
    out.emplace_back("delta", delta(k, Noise{4}));
    for (int t : {0, 1, 3, 4, 7, 9, 11})
        out.emplace_back(std::string("model ") + FORMATS[t].name,
                         model(k, FORMATS[t], threads, KV_F16, {130, 1, 1, 60, 8}, 32));
    out.emplace_back("model q4_1 other pieces",
                     model(k, FORMATS[4], threads, KV_F16, {3, 128, 17, 50, 2}, 32));
    out.emplace_back("model q8 cache",
                     model(k, FORMATS[7], threads, KV_Q8, {130, 1, 1, 60, 8}, 32));
    out.emplace_back("model fp8 cache",
                     model(k, FORMATS[7], threads, KV_FP8, {130, 1, 1, 60, 8}, 32));
    out.emplace_back("model heads of 24", model(k, FORMATS[7], threads, KV_F16, {150, 5}, 24));
    for (const Format& t : FORMATS)
        if (KIND[source_type(t.name)->kind].quantised)
            out.emplace_back(std::string("int12 product ") + t.name, product(k, t, Noise{1}, true));
    for (int t : {3, 4, 7, 9, 11})
        out.emplace_back(std::string("int12 model ") + FORMATS[t].name,
                         model(k, FORMATS[t], threads, KV_F16, {130, 1, 1, 60, 8}, 32, true));
    return out;
}

}  // namespace verbatim
