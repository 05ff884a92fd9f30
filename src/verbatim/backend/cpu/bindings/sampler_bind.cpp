#include "sampler_bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>

#include "isa.h"

namespace nb = nanobind;
using vb::SampleOut;
using vb::SampleParams;
using vb::SampleRow;

namespace verbatim {
namespace {

void check_ids(const std::vector<int32_t>& ids, int64_t vocab) {
    for (int32_t id : ids)
        if (id < 0 || id >= vocab)
            throw std::invalid_argument(
                "a token id of the sampler's parameters is outside the vocabulary");
}

// Every token id is checked here and in read_history, so that the kernel can index unchecked.
void check_row(const SampleRow& row, int64_t vocab) {
    const SampleParams& p = *row.params;
    for (auto [id, value] : p.bias)
        if (id < 0 || id >= vocab)
            throw std::invalid_argument("a token id of logit_bias is outside the vocabulary");
    check_ids(p.allowed, vocab);
    check_ids(p.banned, vocab);
    check_ids(p.withheld, vocab);
    if (row.prompt_len < 0 || row.position < 0)
        throw std::invalid_argument("a position is out of range");
}

// Reads a tuple of ints directly: building an array in Python first takes four times as long.
std::vector<int32_t> read_history(nb::handle ids, int64_t vocab) {
    Py_ssize_t count = PyTuple_Size(ids.ptr());
    if (count < 0) throw nb::python_error();
    std::vector<int32_t> out((size_t)count);
    for (Py_ssize_t i = 0; i < count; i++) {
        long id = PyLong_AsLong(NB_TUPLE_GET_ITEM(ids.ptr(), i));
        if (id == -1 && PyErr_Occurred()) throw nb::python_error();
        if (id < 0 || id >= vocab)
            throw std::invalid_argument("a token of the history is outside the vocabulary");
        out[(size_t)i] = (int32_t)id;
    }
    return out;
}

struct RowRequest {
    SampleRow row{};  // no parameters and no target: skip the row
    std::vector<int32_t> history;
    bool skipped() const { return !row.params && row.target < 0; }
};

RowRequest read_row(nb::tuple t, int64_t vocab) {
    RowRequest out;
    SampleRow& row = out.row;
    if (nb::len(t) == 2) {
        row.target = nb::cast<int64_t>(t[0]);
        row.target_top = nb::cast<int64_t>(t[1]);
        if (row.target < 0 || row.target >= vocab)
            throw std::invalid_argument("a scored token is outside the vocabulary");
        return out;
    }
    row.params = nb::cast<const SampleParams*>(t[0]);
    row.key = nb::cast<uint64_t>(t[1]);
    row.position = nb::cast<int64_t>(t[2]);
    row.prompt_len = nb::cast<int64_t>(t[3]);
    out.history = read_history(t[4], vocab);
    row.history = out.history.data();
    row.history_len = (int64_t)out.history.size();
    if (!t[5].is_none()) {
        nb::bytes mask = nb::cast<nb::bytes>(t[5]);
        row.mask = (const uint8_t*)mask.c_str();
        row.mask_bytes = (int64_t)mask.size();
    }
    if (nb::len(t) > 6) row.step = nb::cast<int64_t>(t[6]);
    check_row(row, vocab);
    return out;
}

nb::object to_tuple(const SampleOut& o) {
    if (!o.finite)
        throw std::invalid_argument(
            "the model computed logits that are not finite numbers; its file or a kernel is "
            "broken");
    nb::list top;
    for (auto [id, value] : o.top) top.append(nb::make_tuple(id, value));
    if (!o.denoised) return nb::make_tuple(o.token, o.logprob, nb::tuple(top));
    // The fields of a Drawn, in their order.
    return nb::make_tuple(o.token, o.logprob, nb::tuple(top), nb::none(), nb::make_tuple(),
                          nb::make_tuple(), o.confidence);
}

}  // namespace

nb::list sample_rows(ThreadPool& pool, vb::SampleFn sample, const float* logits,
                     const float* chunk_maxes, int64_t vocab, nb::list rows) {
    const int64_t chunks = (vocab + vb::CHUNK - 1) / vb::CHUNK;
    std::vector<RowRequest> requests;
    requests.reserve(nb::len(rows));
    // `rows` keeps parameters and masks alive while the GIL is released.
    for (nb::handle h : rows)
        requests.push_back(h.is_none() ? RowRequest{} : read_row(nb::cast<nb::tuple>(h), vocab));
    std::vector<SampleOut> outs(requests.size());
    {
        nb::gil_scoped_release nogil;
        auto draw = [&](int i, int) {
            if (!requests[i].skipped())
                sample(logits + (int64_t)i * vocab,
                       chunk_maxes ? chunk_maxes + i * chunks : nullptr, vocab, requests[i].row,
                       outs[i]);
        };
        if (requests.size() > 1) pool.parallel_for((int)requests.size(), draw);
        else if (requests.size()) draw(0, 0);
    }
    nb::list out;
    for (size_t i = 0; i < outs.size(); i++)
        out.append(requests[i].skipped() ? nb::none() : to_tuple(outs[i]));
    return out;
}

namespace {

// The sampler without an engine, for tests, benchmarks and the CUDA backend.
class RowSampler {
  public:
    using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    RowSampler(const std::string& isa, int threads) : kernels_(select_isa(isa)), pool_(threads) {}
    // `with_maxes`: passes the largest logit of each chunk, as the LM head of the engine does.
    nb::list draw(Rows logits, nb::list rows, bool with_maxes) {
        if (logits.shape(0) != nb::len(rows))
            throw std::invalid_argument("draw() needs one row of parameters per row of logits");
        const int64_t vocab = (int64_t)logits.shape(1);
        std::vector<float> chunk_maxes;
        for (int64_t r = 0; with_maxes && r < (int64_t)logits.shape(0); r++)
            for (int64_t i = 0; i < vocab; i += vb::CHUNK)
                chunk_maxes.push_back(kernels_.max_or_nan(logits.data() + r * vocab + i,
                                                          (int)std::min(vb::CHUNK, vocab - i)));
        return sample_rows(pool_, kernels_.sample, logits.data(),
                           with_maxes ? chunk_maxes.data() : nullptr, vocab, rows);
    }

  private:
    const Kernels& kernels_;
    ThreadPool pool_;
};

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<RowSampler>(m, "RowSampler", "Samples from given logits on one instruction set.")
        .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("threads"))
        .def("draw", &RowSampler::draw, nb::arg("logits"), nb::arg("rows"),
             nb::arg("with_maxes") = false);
    nb::class_<SampleParams>(m, "SampleParams",
                             "Sampling parameters of a request; fields as in SamplingParams.")
        .def(nb::init<>())
        .def_rw("temperature", &SampleParams::temperature)
        .def_rw("top_k", &SampleParams::top_k)
        .def_rw("top_p", &SampleParams::top_p)
        .def_rw("min_p", &SampleParams::min_p)
        .def_rw("typical_p", &SampleParams::typical_p)
        .def_rw("top_n_sigma", &SampleParams::top_n_sigma)
        .def_rw("xtc_probability", &SampleParams::xtc_probability)
        .def_rw("xtc_threshold", &SampleParams::xtc_threshold)
        .def_rw("repetition_penalty", &SampleParams::repetition)
        .def_rw("frequency_penalty", &SampleParams::frequency)
        .def_rw("presence_penalty", &SampleParams::presence)
        .def_rw("dry_multiplier", &SampleParams::dry_multiplier)
        .def_rw("dry_base", &SampleParams::dry_base)
        .def_rw("dry_allowed_length", &SampleParams::dry_allowed_length)
        .def_rw("dry_range", &SampleParams::dry_range)
        .def_rw("no_repeat_ngram", &SampleParams::no_repeat_ngram)
        .def_rw("min_tokens", &SampleParams::min_tokens)
        .def_rw("logprobs", &SampleParams::logprobs)
        .def_rw("report", &SampleParams::report)
        .def_rw("processed", &SampleParams::processed)
        .def_rw("restricted", &SampleParams::restricted)
        .def_rw("logit_bias", &SampleParams::bias)
        .def_rw("allowed_token_ids", &SampleParams::allowed)
        .def_rw("banned_token_ids", &SampleParams::banned)
        .def_rw("withheld", &SampleParams::withheld)
        .def_rw("breaker_ids", &SampleParams::breaker_ids)
        .def_rw("breaker_runs", &SampleParams::breaker_runs);
}

}  // namespace verbatim
