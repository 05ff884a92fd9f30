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

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_ids(const std::vector<int32_t>& ids, int64_t vocab) {
    for (int32_t id : ids)
        if (id < 0 || id >= vocab) throw std::invalid_argument("a token id of the sampler's parameters is outside the vocabulary");
}

// Every id is checked here, once a row at most, so that the kernel may index without looking.
void check_row(const SampleRow& row, int64_t vocab) {
    const SampleParams& p = *row.params;
    for (auto [id, value] : p.bias)
        if (id < 0 || id >= vocab) throw std::invalid_argument("a token id of logit_bias is outside the vocabulary");
    check_ids(p.allowed, vocab);
    check_ids(p.banned, vocab);
    check_ids(p.withheld, vocab);
    if (row.prompt_len < 0 || row.position < 0) throw std::invalid_argument("a position is out of range");
    for (int64_t i = 0; i < row.history_len; i++)
        if (row.history[i] < 0 || row.history[i] >= vocab) throw std::invalid_argument("a token of the history is outside the vocabulary");
}

SampleRow read_row(nb::tuple t) {
    SampleRow row{};
    row.params = nb::cast<const SampleParams*>(t[0]);
    row.key = nb::cast<uint64_t>(t[1]);
    row.position = nb::cast<int64_t>(t[2]);
    row.prompt_len = nb::cast<int64_t>(t[3]);
    if (!t[4].is_none()) {
        Ids history = nb::cast<Ids>(t[4]);
        row.history = history.data();
        row.history_len = (int64_t)history.size();
    }
    if (!t[5].is_none()) {
        nb::bytes mask = nb::cast<nb::bytes>(t[5]);
        row.mask = (const uint8_t*)mask.c_str();
        row.mask_bytes = (int64_t)mask.size();
    }
    return row;
}

}  // namespace

nb::list sample_rows(Team& team, vb::SampleFn sample, const float* logits, int64_t vocab, nb::list rows) {
    std::vector<SampleRow> work;
    for (nb::handle h : rows) {  // `rows` keeps histories and masks alive while the GIL is released
        work.push_back(read_row(nb::cast<nb::tuple>(h)));
        check_row(work.back(), vocab);
    }
    std::vector<SampleOut> outs(work.size());
    {
        nb::gil_scoped_release nogil;
        std::atomic<size_t> next{0};
        auto run = [&](int) {
            for (size_t i; (i = next.fetch_add(1)) < work.size();) sample(logits + i * vocab, vocab, work[i], outs[i]);
        };
        if (work.size() > 1) team.run(run);
        else if (work.size() == 1) run(0);
    }
    nb::list out;
    for (const SampleOut& o : outs) {
        if (!o.finite) throw std::invalid_argument("the model computed logits that are not finite numbers; its file or a kernel is broken");
        nb::list top;
        for (auto [id, value] : o.top) top.append(nb::make_tuple(id, value));
        out.append(nb::make_tuple(o.token, o.logprob, nb::tuple(top)));
    }
    return out;
}

void bind_sampler(nb::module_& m) {
    using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    m.def(
        "sample_logits",
        [](const std::string& isa, int threads, Rows logits, nb::list rows) {
            if (logits.shape(0) != nb::len(rows)) throw std::invalid_argument("one row of parameters for each row of logits");
            Team team(threads);
            return sample_rows(team, select_isa(isa).sample, logits.data(), (int64_t)logits.shape(1), rows);
        },
        nb::arg("isa"), nb::arg("threads"), nb::arg("logits"), nb::arg("rows"),
        "Draw from given logits with one instruction set's sampler: for tests and benchmarks.");
    nb::class_<SampleParams>(m, "SampleParams", "What a request asks of the sampler; fields as in SamplingParams.")
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
