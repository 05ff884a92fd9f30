#include "draft_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace verbatim {

namespace {
constexpr float EPS = 1e-6f;
constexpr float COLD = 0.05f;  // model/draft_head.py says why
constexpr float LIKELY = 0.6f;  // how sure a next guess is, more often than not; where that would be too little, it is not made
constexpr int WIDE = 8;  // panels of one unit of scores
enum : int { BEGIN, UP, DOWN, CLOSE, SCORE };
}  // namespace

void DraftHead::Rows::fit(int rows, int w) {
    rows = (rows + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE * SIDE_BY_SIDE;
    width = w;
    size_t blocks = (size_t)rows * (w / 32) + 16;
    if (f.size() < (size_t)rows * w + 64) {
        f.resize((size_t)rows * w + 64);
        q.resize(32 * blocks + 64);
        dx.resize(blocks);
        ds.resize(blocks);
        s16.resize(2 * blocks);
    }
    quant = {q.data(), dx.data(), ds.data(), s16.data(), 1};
}

DraftHead::DraftHead(Engine& engine, Net net) : engine_(engine), kernels_(engine.kernels), net_(std::move(net)) {
    hidden_ = engine.shape.hidden;
    const Packed &up = engine.matrix(net_.up), &down = engine.matrix(net_.down), &head = engine.matrix(net_.head);
    inner_ = down.k;
    auto is = [&](const std::vector<float>& v) { return (int)v.size() == hidden_; };
    bool fits = up.k == 2 * hidden_ && up.n == 2 * inner_ && down.n == hidden_ && head.k == hidden_ && head.n == (int)net_.words.size();
    if (!fits || !is(net_.state_scale) || !is(net_.word_scale) || !is(net_.keep) || !is(net_.out)) throw std::invalid_argument("this draft head does not fit the model");
    if (hidden_ % 32 || inner_ % 32) throw std::invalid_argument("a draft head needs widths that are multiples of 32");
    for (int32_t w : net_.words)
        if (w < 0 || w >= engine.shape.vocab) throw std::invalid_argument("a word of the draft head is outside the vocabulary");
}

void DraftHead::quantise(Rows& to, int r) const {
    kernels_.quantise(to.row(r), to.width, to.quant.from(to.quant.first(r, to.width / 32)));
}

void DraftHead::product(const Packed& w, int p, int np, Rows& in, float* out, int64_t ld) const {
    kernels_.mm[w.kind](w, p, np, in.quant, in.f.data(), nullptr, rows_, out, ld, nullptr);
}

void DraftHead::begin(int r) {
    const float* h = state_.data() + (size_t)r * hidden_;
    float *x = x_.row(r), *word = x + hidden_;
    for (int i = 0; i < hidden_; i++) x[i] = h[i] * net_.state_scale[i];
    unpack_row(engine_.matrix(net_.embed), token_[r], kernels_.byte_bias, word);
    kernels_.rms(word, net_.word_scale.data(), hidden_, EPS, word);
    quantise(x_, r);
}

// 32 of the inner values
void DraftHead::up(int unit) {
    const Packed& w = engine_.matrix(net_.up);
    float gate[ROWS * 32], value[ROWS * 32];
    product(w, 2 * unit, 2, x_, gate, 32);
    product(w, inner_ / 16 + 2 * unit, 2, x_, value, 32);
    kernels_.gate(A_SILU, gate, value, 32 * rows_, value);
    for (int r = 0; r < rows_; r++) {
        std::memcpy(mid_.row(r) + 32 * unit, value + 32 * r, 32 * sizeof(float));
        kernels_.quantise(value + 32 * r, 32, mid_.quant.from(mid_.quant.first(r, inner_ / 32) + (int64_t)unit * mid_.quant.group));
    }
}

void DraftHead::down(int unit) {
    const Packed& w = engine_.matrix(net_.down);
    float tile[ROWS * 32];
    int p = 2 * unit, np = std::min(2, w.panels - p);
    product(w, p, np, mid_, tile, 32);
    for (int r = 0; r < rows_; r++)
        for (int i = 16 * p; i < std::min(16 * (p + np), hidden_); i++)
            end_.row(r)[i] = state_[(size_t)r * hidden_ + i] * net_.keep[i] + tile[32 * r + i - 16 * p];
}

void DraftHead::close(int r) {
    kernels_.rms(end_.row(r), net_.out.data(), hidden_, EPS, end_.row(r));
    quantise(end_, r);
}

void DraftHead::score(int unit) {
    const Packed& w = engine_.matrix(net_.head);
    float tile[ROWS * 16 * WIDE];
    int p = WIDE * unit, np = std::min(WIDE, w.panels - p), n = std::min(16 * np, w.n - 16 * p);
    product(w, p, np, end_, tile, 16 * WIDE);
    for (int r = 0; r < rows_; r++) {
        float *s = tile + (size_t)r * 16 * WIDE, sums[8] = {0};
        const float value = kernels_.top(s, n), cool = 1.0f / heat_[r];
        int top = 0;
        while (top < n - 1 && s[top] != value) top++;
        for (int i = 0; i < n; i++) s[i] = (s[i] - value) * cool;
        kernels_.exps(s, n, s);
        for (int i = 0; i < n; i++) sums[i % 8] += s[i];  // eight, so that one addition need not wait for another
        found_[(size_t)unit * rows_ + r] = {value, std::accumulate(sums, sums + 8, 0.0f), net_.words[16 * p + top]};
    }
}

DraftHead::Best DraftHead::best(int r) const {
    size_t units = found_.size() / rows_;
    Best b = found_[r];
    for (size_t u = 1; u < units; u++)
        if (found_[u * rows_ + r].value > b.value) b = found_[u * rows_ + r];
    b.sum = 0;
    for (size_t u = 0; u < units; u++) {
        const Best& f = found_[u * rows_ + r];
        b.sum += f.sum * std::exp((f.value - b.value) / heat_[r]);
    }
    return b;
}

void DraftHead::phase(int number, Units& units) {
    for (int u; (u = units.next()) >= 0;) switch (dropped_.load(std::memory_order_relaxed) ? -1 : number) {
            case BEGIN: begin(u); break;
            case UP: up(u); break;
            case DOWN: down(u); break;
            case CLOSE: close(u); break;
            case SCORE: score(u); break;
        }
}

void DraftHead::drop() {
    dropped_.store(true, std::memory_order_relaxed);
    started_.clear();
}

// The texts that are asked for, and their states.
void DraftHead::take(const std::vector<Ask>& asks) {
    live_.clear();
    for (size_t i = 0; i < asks.size() && live_.size() < ROWS; i++)
        if (asks[i].limit > 0) live_.push_back((int)i);
    state_.resize(live_.size() * hidden_);
    for (size_t r = 0; r < live_.size(); r++)
        std::memcpy(state_.data() + r * hidden_, engine_.hidden() + (int64_t)asks[live_[r]].row * hidden_, (size_t)hidden_ * 4);
}

// One guess more for all that go on.
void DraftHead::lay_out(const std::vector<Ask>& asks, const std::vector<Guess>& sofar) {
    rows_ = (int)live_.size();
    x_.fit(rows_, 2 * hidden_);
    mid_.fit(rows_, inner_);
    end_.fit(rows_, hidden_);
    for (Rows* in : {&x_, &mid_, &end_}) in->quant.group = side_by_side(rows_);
    token_.resize(rows_);
    heat_.resize(rows_);
    for (int r = 0; r < rows_; r++) {
        const Guess& g = sofar[live_[r]];
        token_[r] = g.tokens.empty() ? asks[live_[r]].token : g.tokens.back();
        heat_[r] = asks[live_[r]].temperature > COLD ? asks[live_[r]].temperature : 1.0f;
    }
    found_.resize((size_t)units().back() * rows_);
    dropped_.store(false, std::memory_order_relaxed);
}

std::vector<int> DraftHead::units() const {
    const int wide = (engine_.matrix(net_.head).panels + WIDE - 1) / WIDE, low = (engine_.matrix(net_.down).panels + 1) / 2;
    return {rows_, inner_ / 32, low, rows_, wide};
}

void DraftHead::start(const std::vector<Ask>& asks) {
    engine_.pool().settle();
    take(asks);
    if (live_.empty()) return;
    lay_out(asks, std::vector<Guess>(asks.size()));
    started_ = asks;
    engine_.pool().start(*this, units());
}

std::vector<DraftHead::Guess> DraftHead::guess(const std::vector<Ask>& asks, float floor) {
    std::vector<Guess> out(asks.size());
    bool started = !started_.empty() && std::equal(asks.begin(), asks.end(), started_.begin(), started_.end(), [](const Ask& a, const Ask& b) { return a.like(b); });
    if (started) engine_.pool().join();
    else engine_.pool().settle(), take(asks);
    started_.clear();
    for (; !live_.empty(); started = false) {
        if (!started) {
            lay_out(asks, out);
            engine_.pool().perform(*this, units());
        }
        int kept = 0;
        for (int r = 0; r < rows_; r++) {
            Guess& g = out[live_[r]];
            Best b = best(r);
            float odds = (g.odds.empty() ? 1.0f : g.odds.back()) / b.sum;
            g.tokens.push_back(b.word);
            g.odds.push_back(odds);
            if (!(odds * LIKELY >= floor) || (int)g.tokens.size() >= asks[live_[r]].limit) continue;
            std::memcpy(state_.data() + (size_t)kept * hidden_, end_.row(r), (size_t)hidden_ * 4);
            live_[kept++] = live_[r];
        }
        live_.resize(kept);
    }
    return out;
}

}  // namespace verbatim
