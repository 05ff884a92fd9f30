#include "draft_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace verbatim {

namespace {
constexpr float EPS = 1e-6f;
constexpr float MIN_TEMPERATURE = 0.05f;  // below: use 1; model/loading/draft_head.py says why
// Typical probability of the next draft token. Drafting stops where even this would fall below the
// floor.
constexpr float TYPICAL_ACCEPT = 0.6f;
constexpr int SCORE_PANELS = 8;  // panels per work item of the score phase
// phases of one draft position
enum : int { P_INPUT, P_UP, P_DOWN, P_NORM, P_SCORE };
}  // namespace

void DraftHead::Rows::resize_for(int rows, int w) {
    rows = (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP;
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

DraftHead::DraftHead(Engine& engine, Net net)
    : engine_(engine), kernels_(engine.kernels), net_(std::move(net)) {
    hidden_ = engine.shape.hidden;
    const Packed &up = engine.matrix(net_.up), &down = engine.matrix(net_.down),
                 &head = engine.matrix(net_.head);
    inner_ = down.k;
    auto is = [&](const std::vector<float>& v) { return (int)v.size() == hidden_; };
    bool fits = up.k == 2 * hidden_ && up.n == 2 * inner_ && down.n == hidden_ &&
                head.k == hidden_ && head.n == (int)net_.token_ids.size();
    if (!fits || !is(net_.state_scale) || !is(net_.embed_scale) || !is(net_.keep) || !is(net_.out))
        throw std::invalid_argument("this draft head does not fit the model");
    if (hidden_ % 32 || inner_ % 32)
        throw std::invalid_argument("a draft head needs widths that are multiples of 32");
    for (int32_t w : net_.token_ids)
        if (w < 0 || w >= engine.shape.vocab)
            throw std::invalid_argument("a token id of the draft head is outside the vocabulary");
}

void DraftHead::quantise(Rows& to, int r) const {
    kernels_.quantise(to.row(r), to.width,
                      to.quant.at_block(to.quant.first_block(r, to.width / 32)));
}

void DraftHead::product(const Packed& w, int p, int np, Rows& in, float* out, int64_t ld) const {
    kernels_.mm[w.kind](w, p, np, in.quant, in.f.data(), nullptr, rows_, out, ld, nullptr);
}

void DraftHead::build_input(int r) {
    const float* h = state_.data() + (size_t)r * hidden_;
    float *x = x_.row(r), *embedding = x + hidden_;
    for (int i = 0; i < hidden_; i++) x[i] = h[i] * net_.state_scale[i];
    unpack_row(engine_.matrix(net_.embed), token_[r], kernels_.byte_bias, embedding);
    kernels_.rms_norm(embedding, net_.embed_scale.data(), hidden_, EPS, embedding);
    quantise(x_, r);
}

// 32 inner values per work item.
void DraftHead::up(int item) {
    const Packed& w = engine_.matrix(net_.up);
    float gate[MM_ROWS * 32], value[MM_ROWS * 32];
    product(w, 2 * item, 2, x_, gate, 32);
    product(w, inner_ / 16 + 2 * item, 2, x_, value, 32);
    kernels_.gate(A_SILU, gate, value, 32 * rows_, value);
    for (int r = 0; r < rows_; r++) {
        std::memcpy(mid_.row(r) + 32 * item, value + 32 * r, 32 * sizeof(float));
        kernels_.quantise(value + 32 * r, 32,
                          mid_.quant.at_block(mid_.quant.first_block(r, inner_ / 32) +
                                              (int64_t)item * mid_.quant.group));
    }
}

void DraftHead::down(int item) {
    const Packed& w = engine_.matrix(net_.down);
    float tile[MM_ROWS * 32];
    int p = 2 * item, np = std::min(2, w.panels - p);
    product(w, p, np, mid_, tile, 32);
    for (int r = 0; r < rows_; r++)
        for (int i = 16 * p; i < std::min(16 * (p + np), hidden_); i++)
            end_.row(r)[i] =
                state_[(size_t)r * hidden_ + i] * net_.keep[i] + tile[32 * r + i - 16 * p];
}

void DraftHead::norm_output(int r) {
    kernels_.rms_norm(end_.row(r), net_.out.data(), hidden_, EPS, end_.row(r));
    quantise(end_, r);
}

void DraftHead::score(int item) {
    const Packed& w = engine_.matrix(net_.head);
    float tile[MM_ROWS * 16 * SCORE_PANELS];
    int p = SCORE_PANELS * item, np = std::min(SCORE_PANELS, w.panels - p),
        n = std::min(16 * np, w.n - 16 * p);
    product(w, p, np, end_, tile, 16 * SCORE_PANELS);
    for (int r = 0; r < rows_; r++) {
        float *s = tile + (size_t)r * 16 * SCORE_PANELS, sums[8] = {0};
        const float value = kernels_.max_or_nan(s, n), inv_temperature = 1.0f / temperature_[r];
        int top = 0;
        while (top < n - 1 && s[top] != value) top++;
        for (int i = 0; i < n; i++) s[i] = (s[i] - value) * inv_temperature;
        kernels_.exps(s, n, s);
        // Eight accumulators, so that the additions do not wait for each other.
        for (int i = 0; i < n; i++) sums[i % 8] += s[i];
        chunk_best_[(size_t)item * rows_ + r] = {value, std::accumulate(sums, sums + 8, 0.0f),
                                                 net_.token_ids[16 * p + top]};
    }
}

DraftHead::Best DraftHead::best(int r) const {
    size_t items = chunk_best_.size() / rows_;
    Best b = chunk_best_[r];
    for (size_t u = 1; u < items; u++)
        if (chunk_best_[u * rows_ + r].value > b.value) b = chunk_best_[u * rows_ + r];
    b.sum = 0;
    for (size_t u = 0; u < items; u++) {
        const Best& f = chunk_best_[u * rows_ + r];
        b.sum += f.sum * std::exp((f.value - b.value) / temperature_[r]);
    }
    return b;
}

void DraftHead::phase(int number, WorkItems& items) {
    for (int u; (u = items.next()) >= 0;)
        switch (cancelled_.load(std::memory_order_relaxed) ? -1 : number) {
            case P_INPUT: build_input(u); break;
            case P_UP: up(u); break;
            case P_DOWN: down(u); break;
            case P_NORM: norm_output(u); break;
            case P_SCORE: score(u); break;
        }
}

void DraftHead::cancel() {
    cancelled_.store(true, std::memory_order_relaxed);
    started_.clear();
}

// Selects the queries to draft for and copies their hidden states.
void DraftHead::select_active(const std::vector<Query>& queries) {
    active_.clear();
    for (size_t i = 0; i < queries.size() && active_.size() < MM_ROWS; i++)
        if (queries[i].limit > 0) active_.push_back((int)i);
    state_.resize(active_.size() * hidden_);
    for (size_t r = 0; r < active_.size(); r++)
        std::memcpy(state_.data() + r * hidden_,
                    engine_.hidden() + (int64_t)queries[active_[r]].row * hidden_,
                    (size_t)hidden_ * 4);
}

// Sets up buffers and inputs of the next draft position for all active queries.
void DraftHead::setup_position(const std::vector<Query>& queries,
                               const std::vector<Draft>& drafts) {
    rows_ = (int)active_.size();
    x_.resize_for(rows_, 2 * hidden_);
    mid_.resize_for(rows_, inner_);
    end_.resize_for(rows_, hidden_);
    for (Rows* in : {&x_, &mid_, &end_}) in->quant.group = row_group(rows_);
    token_.resize(rows_);
    temperature_.resize(rows_);
    for (int r = 0; r < rows_; r++) {
        const Draft& g = drafts[active_[r]];
        token_[r] = g.tokens.empty() ? queries[active_[r]].token : g.tokens.back();
        temperature_[r] = queries[active_[r]].temperature > MIN_TEMPERATURE
                              ? queries[active_[r]].temperature
                              : 1.0f;
    }
    chunk_best_.resize((size_t)item_counts().back() * rows_);
    cancelled_.store(false, std::memory_order_relaxed);
}

std::vector<int> DraftHead::item_counts() const {
    const int score_items = (engine_.matrix(net_.head).panels + SCORE_PANELS - 1) / SCORE_PANELS,
              down_items = (engine_.matrix(net_.down).panels + 1) / 2;
    return {rows_, inner_ / 32, down_items, rows_, score_items};
}

void DraftHead::start(const std::vector<Query>& queries) {
    engine_.pool().cancel_started();
    select_active(queries);
    if (active_.empty()) return;
    setup_position(queries, std::vector<Draft>(queries.size()));
    started_ = queries;
    engine_.pool().start(*this, item_counts());
}

std::vector<DraftHead::Draft> DraftHead::draft(const std::vector<Query>& queries, float floor) {
    std::vector<Draft> out(queries.size());
    bool started = !started_.empty() &&
                   std::equal(queries.begin(), queries.end(), started_.begin(), started_.end(),
                              [](const Query& a, const Query& b) { return a.same_start(b); });
    if (started) engine_.pool().join();
    else engine_.pool().cancel_started(), select_active(queries);
    started_.clear();
    for (; !active_.empty(); started = false) {
        if (!started) {
            setup_position(queries, out);
            engine_.pool().run(*this, item_counts());
        }
        int kept = 0;
        for (int r = 0; r < rows_; r++) {
            Draft& g = out[active_[r]];
            Best b = best(r);
            float accept_prob = (g.accept_prob.empty() ? 1.0f : g.accept_prob.back()) / b.sum;
            g.tokens.push_back(b.token);
            g.accept_prob.push_back(accept_prob);
            if (!(accept_prob * TYPICAL_ACCEPT >= floor) ||
                (int)g.tokens.size() >= queries[active_[r]].limit)
                continue;
            std::memcpy(state_.data() + (size_t)kept * hidden_, end_.row(r), (size_t)hidden_ * 4);
            active_[kept++] = active_[r];
        }
        active_.resize(kept);
    }
    return out;
}

}  // namespace verbatim
