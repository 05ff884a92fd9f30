// Python bindings of the native engine. All arguments are checked here; the GIL is released while a
// step runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "engine.h"
#include "isa.h"
#include "sampler_bind.h"
#include "selftest.h"

namespace nb = nanobind;
using namespace verbatim;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

int64_t integer(PyObject* o) {
    int64_t v = PyLong_AsLongLong(o);
    if (v == -1 && PyErr_Occurred()) throw nb::python_error();
    return v;
}

struct Names {  // attribute names of SeqStep, interned once
    nb::str tokens{"tokens"}, start{"start"}, blocks{"blocks"}, draws{"draws"}, targets{"targets"},
        hidden{"hidden"}, adapter{"adapter"}, block{"block"}, causal{"causal"},
        picks{"picks"};
};

// Converts the sequences of a StepPlan to a Step. Every index is checked here, so that the kernels
// need not.
void read_sequences(Engine& e, nb::tuple sequences, int groups,
                    const std::vector<int64_t>& blocks) {
    static Names* names = new Names();
    Step& s = e.step;
    s.tokens.clear();
    s.positions.clear();
    s.sequence.clear();
    s.adapter.clear();
    s.adapted.clear();
    s.outputs.clear();
    s.logits.clear();
    s.captures = false;
    s.sequences.resize(nb::len(sequences));
    int index = 0;
    for (nb::handle h : sequences) {
        Sequence& q = s.sequences[index];
        nb::tuple tokens = nb::cast<nb::tuple>(h.attr(names->tokens)),
                  tables = nb::cast<nb::tuple>(h.attr(names->blocks));
        q.row0 = (int)s.tokens.size();
        q.rows = (int)nb::len(tokens);
        q.start = integer(nb::object(h.attr(names->start)).ptr());
        q.block = integer(nb::object(h.attr(names->block)).ptr());
        q.causal = integer(nb::object(h.attr(names->causal)).ptr());
        if (q.block < 0 || (!q.block && !q.start))
            throw std::invalid_argument("a block of attention has no positions");
        if (q.start < 0 || q.start > e.max_positions() - q.rows)
            throw std::invalid_argument("a position is out of range");
        int64_t adapter = integer(nb::object(h.attr(names->adapter)).ptr());
        if (adapter < -1 || adapter >= e.adapters())
            throw std::invalid_argument("adapter " + std::to_string(adapter) + " does not exist");
        for (int i = 0; i < q.rows; i++) {
            s.adapter.push_back((int32_t)adapter);
            if (adapter >= 0) s.adapted.push_back(q.row0 + i);
            int64_t t = integer(NB_TUPLE_GET_ITEM(tokens.ptr(), i));
            if (t < 0 || t >= e.shape.vocab)
                throw std::invalid_argument("token " + std::to_string(t) +
                                            " is outside the vocabulary");
            s.tokens.push_back((int32_t)t);
            s.positions.push_back((int32_t)(q.start + i));
            s.sequence.push_back(index);
        }
        if ((int)nb::len(tables) != groups)
            throw std::invalid_argument("a sequence needs one block table per cache group");
        q.blocks.resize(groups);
        for (int g = 0; g < groups; g++) {
            PyObject* table = NB_TUPLE_GET_ITEM(tables.ptr(), g);
            if (!PyTuple_Check(table)) throw std::invalid_argument("a block table must be a tuple");
            Py_ssize_t n = NB_TUPLE_GET_SIZE(table);
            q.blocks[g].resize(n);
            for (Py_ssize_t i = 0; i < n; i++) {
                int64_t b = integer(NB_TUPLE_GET_ITEM(table, i));
                if (b < -1 || b >= blocks[g])
                    throw std::invalid_argument("block " + std::to_string(b) + " does not exist");
                q.blocks[g][i] = (int32_t)b;
            }
            int window = e.group_window(g);
            int64_t end = q.start + q.rows - !q.block,
                    from = window ? std::max<int64_t>(0, q.start - window + 1) : 0;
            for (int64_t b = from / BLOCK; b * BLOCK < end; b++)
                if (b >= n || q.blocks[g][b] < 0)
                    throw std::invalid_argument("a visible position has no cache block");
        }
        int draws = (int)integer(nb::object(h.attr(names->draws)).ptr());
        int targets = (int)nb::len(nb::object(h.attr(names->targets)));
        bool hidden = nb::cast<bool>(nb::object(h.attr(names->hidden)));
        if (draws < 0 || draws > q.rows || targets > q.rows)
            throw std::invalid_argument("more draws or targets than tokens");
        nb::tuple picks = nb::cast<nb::tuple>(h.attr(names->picks));
        int picked = (int)nb::len(picks), next = 0;
        for (int i = 0; i < q.rows; i++) {
            bool logit = i < targets || i >= q.rows - draws;
            if (picked) {
                logit = next < picked && integer(NB_TUPLE_GET_ITEM(picks.ptr(), next)) == i;
                next += logit;
            }
            if (logit) s.logits.push_back((int32_t)s.outputs.size());
            if (logit || hidden) s.outputs.push_back(q.row0 + i);
        }
        if (next < picked) throw std::invalid_argument("picked rows must exist and ascend");
        s.captures |= hidden;
        index++;
    }
}

class PyEngine {
  public:
    PyEngine(const std::string& isa, int threads, int vocab, int hidden, int heads, int kv_heads,
             int head_dim, const std::string& activation, bool layer_norm, float eps,
             const std::string& kv_type, bool fine, PyEngine* target, Mesh* mesh)
        : engine_(select_isa(isa), threads,
                  Shape{vocab, hidden, heads, kv_heads, head_dim, act(activation), layer_norm, eps},
                  kv(kv_type), fine, target ? &target->engine_ : nullptr, mesh),
          mesh_(mesh) {
        if (heads % kv_heads || heads / kv_heads > MAX_QUERIES || head_dim > 1024)
            throw std::invalid_argument("no kernel for this number or size of attention heads");
    }
    static KvType kv(const std::string& n) {
        if (n == "f16") return KV_F16;
        if (n == "q8") return KV_Q8;
        if (n == "fp8") return KV_FP8;
        throw std::invalid_argument("no kernel for a KV cache of type " + n);
    }
    static int act(const std::string& n) {
        if (n == "silu") return A_SILU;
        if (n == "gelu") return A_GELU;
        if (n == "gelu_tanh") return A_GELU_TANH;
        if (n == "relu2") return A_RELU2;
        if (n == "swiglu_oai") return A_SWIGLU_OAI;
        throw std::invalid_argument("no kernel for activation " + n);
    }
    int matrix(const std::string& type, Bytes data, int64_t rows, int64_t k, int group) {
        nb::gil_scoped_release nogil;
        return engine_.add_matrix(type, data.data(), (int64_t)data.size(), rows, k, group);
    }
    int vector(Floats v) { return engine_.add_vector(v.data(), (int64_t)v.size()); }
    int rope(Doubles f, double factor) { return engine_.add_rope(f.data(), (int)f.size(), factor); }
    int lora(const std::vector<int>& a, const std::vector<int>& b,
             const std::vector<float>& scale) {
        if (a.size() != b.size() || a.size() != scale.size())
            throw std::invalid_argument("an adapter has A, B and a scale");
        std::vector<LowRank> adapters;
        for (size_t i = 0; i < a.size(); i++) adapters.push_back({a[i], b[i], scale[i]});
        return engine_.add_lora(adapters);
    }
    void group(int window, const std::vector<int>& layers, int kind, int64_t floats, int kv_heads,
               int head_dim) {
        const int heads = engine_.shape.heads;
        if (kv_heads < 0 || head_dim < 0 || head_dim > 1024 ||
            (kv_heads && (heads % kv_heads || heads / kv_heads > MAX_QUERIES)))
            throw std::invalid_argument("no kernel for this number or size of attention heads");
        if (kind < G_ATTENTION || kind > G_STATE || (kind != G_ATTENTION) != (floats > 0))
            throw std::invalid_argument("a cache group of an unknown kind");
        engine_.add_group(window, layers, (GroupKind)kind, floats, kv_heads, head_dim);
        groups_++;
    }
    void op(const std::string& type, nb::kwargs kw) {
        static const char* NAMES[] = {"embed", "positions", "qkv", "attend", "linear", "gateup",
                                      "norm",  "normadd",   "moe", "head",   "heads",  "conv",
                                      "delta", "gated", "layer_inputs", "layer_gate", "scale",
                                      "states", "gather", "capture", "scatter", "clusters"};
        Op o{};
        o.states_width = runs_with_;
        o.type = (OpType)-1;
        for (int i = 0; i < (int)std::size(NAMES); i++)
            if (type == NAMES[i]) o.type = (OpType)i;
        if ((int)o.type < 0) throw std::invalid_argument("unknown operation " + type);
        for (auto [key, value] : kw) {
            std::string k = nb::cast<std::string>(key);
            if (k == "src") o.src = nb::cast<int>(value);
            else if (k == "dst") o.dst = nb::cast<int>(value);
            else if (k == "keys") o.keys = nb::cast<int>(value);
            else if (k == "values") o.values = nb::cast<int>(value);
            else if (k == "norm") o.norm = nb::cast<int>(value);
            else if (k == "norm_bias") o.norm_bias = nb::cast<int>(value);
            else if (k == "mat") copy3(nb::cast<std::vector<int>>(value), o.mat);
            else if (k == "bias") copy3(nb::cast<std::vector<int>>(value), o.bias);
            else if (k == "lora") copy3(nb::cast<std::vector<int>>(value), o.lora);
            else if (k == "add") o.add = nb::cast<bool>(value);
            else if (k == "layer") o.layer = nb::cast<int>(value);
            else if (k == "rope") o.rope = nb::cast<int>(value);
            else if (k == "qnorm") o.qnorm = nb::cast<int>(value);
            else if (k == "knorm") o.knorm = nb::cast<int>(value);
            else if (k == "vnorm") o.vnorm = nb::cast<int>(value);
            else if (k == "offset") o.offset = nb::cast<int>(value);
            else if (k == "norm_last") o.norm_last = nb::cast<bool>(value);
            else if (k == "query_scales") o.query_scales = nb::cast<int>(value);
            else if (k == "query_length") o.query_length = nb::cast<int>(value);
            else if (k == "sinks") o.sinks = nb::cast<int>(value);
            else if (k == "scale") o.scale = nb::cast<float>(value);
            else if (k == "softcap") o.softcap = nb::cast<float>(value);
            else if (k == "outputs") o.outputs = nb::cast<bool>(value);
            else if (k == "used") o.used = nb::cast<int>(value);
            else if (k == "renormalise") o.renormalise = nb::cast<bool>(value);
            else if (k == "sigmoid") o.sigmoid = nb::cast<bool>(value);
            else if (k == "groups") o.groups = nb::cast<int>(value);
            else if (k == "groups_used") o.groups_used = nb::cast<int>(value);
            else if (k == "choice_bias") o.choice_bias = nb::cast<int>(value);
            else if (k == "experts_scale") o.experts_scale = nb::cast<float>(value);
            else if (k == "expert_scales") o.expert_scales = nb::cast<int>(value);
            else if (k == "expert_bias") copy3(nb::cast<std::vector<int>>(value), o.expert_bias);
            else if (k == "gates") o.experts[0] = nb::cast<std::vector<int>>(value);
            else if (k == "ups") o.experts[1] = nb::cast<std::vector<int>>(value);
            else if (k == "downs") o.experts[2] = nb::cast<std::vector<int>>(value);
            else if (k == "kernel") o.kernel = nb::cast<int>(value);
            else if (k == "kernel_bias") o.kernel_bias = nb::cast<int>(value);
            else if (k == "taps") o.taps = nb::cast<int>(value);
            else if (k == "betas") o.betas = nb::cast<int>(value);
            else if (k == "alphas") o.alphas = nb::cast<int>(value);
            else if (k == "decay") o.decay = nb::cast<int>(value);
            else if (k == "dt") o.dt = nb::cast<int>(value);
            else if (k == "key_heads") o.key_heads = nb::cast<int>(value);
            else if (k == "value_heads") o.value_heads = nb::cast<int>(value);
            else if (k == "key_dim") o.key_dim = nb::cast<int>(value);
            else if (k == "value_dim") o.value_dim = nb::cast<int>(value);
            else if (k == "joined") o.joined = nb::cast<bool>(value);
            else if (k == "tiled") o.tiled = nb::cast<bool>(value);
            else if (k == "widths") o.widths = nb::cast<std::vector<int>>(value);
            else if (k == "picks") o.picks = nb::cast<bool>(value);
            else if (k == "logits") o.logits = nb::cast<bool>(value);
            else if (k == "states_width") o.states_width = nb::cast<int>(value);
            else if (k == "ids") o.ids = nb::cast<int>(value);
            else throw std::invalid_argument("unknown field " + k);
        }
        if (o.type == O_STATES) state_widths_.push_back(engine_.buffer_width(o.dst));
        if (o.states_width < 0) state_widths_.push_back(0);
        engine_.add_op(std::move(o));
    }
    static void copy3(const std::vector<int>& v, int* out) {
        for (size_t i = 0; i < v.size() && i < 3; i++) out[i] = v[i];
    }
    void finish() { engine_.finish(); }
    void read_cache_of(PyEngine& target) {
        engine_.read_cache_of(target.engine_);
        cache_ = &target;
    }
    std::vector<int64_t> block_bytes() const {
        std::vector<int64_t> out;
        for (int g = 0; g < groups_ && cache_ == this; g++) out.push_back(engine_.block_bytes(g));
        return out;
    }
    void allocate(const std::vector<int64_t>& blocks) {
        if (cache_ != this) return;
        if ((int)blocks.size() != groups_)
            throw std::invalid_argument("allocate() needs one number of blocks per cache group");
        engine_.allocate(blocks);
        blocks_ = blocks;
    }
    void copy(int group, int64_t from, int64_t to) {
        if (group < 0 || group >= groups_ || from < 0 || to < 0 || from >= blocks_[group] ||
            to >= blocks_[group])
            throw std::invalid_argument("a block copy is out of range");
        engine_.copy_block(group, from, to);
    }
    uint8_t* block(int group, int64_t block) {
        if (group < 0 || group >= groups_ || block < 0 || block >= blocks_[group])
            throw std::invalid_argument("the block is out of range");
        return engine_.block(group, block);
    }
    nb::bytes read_block(int group, int64_t number) {
        return nb::bytes(block(group, number), (size_t)engine_.block_bytes(group));
    }
    void write_block(int group, int64_t number, nb::bytes data) {
        uint8_t* to = block(group, number);
        if ((int64_t)data.size() != engine_.block_bytes(group))
            throw std::invalid_argument("write_block() needs exactly the bytes of one block");
        std::memcpy(to, data.data(), data.size());
    }
    // `frame`: what rank 0 of a group tells the others first, so that they take the same step.
    int step(nb::tuple sequences, nb::bytes frame) {
        if (cache_->blocks_.empty()) throw std::invalid_argument("call allocate() before step()");
        try {
            read_sequences(engine_, sequences, groups_, cache_->blocks_);
        } catch (...) {
            engine_.step = {};  // rows that were not computed must not be readable as logits
            throw;
        }
        if (std::none_of(state_widths_.begin(), state_widths_.end(), [&](size_t width) {
                return engine_.step.states.size() == engine_.step.tokens.size() * width;
            }) && !state_widths_.empty())
            throw std::invalid_argument("a draft layer needs one state for each token");
        if (engine_.step.tokens.empty() && !frame.size()) return 0;
        nb::gil_scoped_release nogil;
        if (mesh_ && frame.size()) mesh_->broadcast(frame.data(), frame.size());
        if (engine_.step.tokens.empty()) return 0;
        engine_.run();
        return (int)engine_.step.logits.size();
    }
    // The states that the tokens of the next step() of a draft layer come with.
    void states(Floats v) { engine_.step.states.assign(v.data(), v.data() + v.size()); }
    nb::object logits(nb::handle self) {
        return view(engine_.logits(), engine_.step.logits.size(), engine_.shape.vocab, self);
    }
    nb::object hidden(nb::handle self) {
        return view(engine_.hidden(), engine_.step.outputs.size(), engine_.shape.hidden, self);
    }
    // The captured states of the rows of hidden(), side by side.
    nb::object captured(nb::handle self) {
        return view(engine_.captured(), engine_.step.outputs.size(), engine_.captured_width(), self);
    }
    static nb::object view(const float* p, size_t rows, size_t width, nb::handle owner) {
        return nb::cast(nb::ndarray<nb::numpy, const float, nb::ndim<2>>(p, {rows, width}, owner));
    }
    std::vector<int> argmax() {
        std::vector<int> out(engine_.step.logits.size());
        for (size_t i = 0; i < out.size(); i++) engine_.argmax((int)i, &out[i]);
        return out;
    }
    Engine engine_;
    Mesh* mesh_;
    std::vector<size_t> state_widths_;  // widths of the states that a draft layer reads
    int runs_with_ = 0;  // Op::states_width of the operations that are recorded
    int groups_ = 0;
    std::vector<int64_t> blocks_;
    const PyEngine* cache_ = this;  // the engine whose KV cache this one reads
};

nb::bytes gather(Mesh& mesh, Bytes piece, const std::vector<size_t>& sizes, bool root) {
    if ((int)sizes.size() != mesh.ranks() || sizes[mesh.rank()] != piece.size())
        throw std::invalid_argument("the piece does not have the size of this rank's");
    size_t all = 0;
    for (size_t size : sizes) all += size;
    nb::object joined = nb::steal(PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)all));
    char* at = PyBytes_AsString(joined.ptr());
    std::vector<void*> to;
    for (size_t r = 0; r < sizes.size(); at += sizes[r++]) to.push_back(at);
    std::memcpy(to[mesh.rank()], piece.data(), piece.size());
    {
        nb::gil_scoped_release nogil;
        mesh.gather(piece.data(), sizes, to.data(), root);
    }
    return nb::borrow<nb::bytes>(joined);
}

// A single matrix product with the kernels of the engine, for tests.
nb::object product(const std::string& isa, const std::string& type, Bytes data, int n,
                   nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x,
                   bool fine) {
    const Kernels& k = select_isa(isa);
    int rows = (int)x.shape(0), width = (int)x.shape(1);
    Engine e(k, 1, Shape{16, 16, 1, 1, 16, A_SILU, false, 1e-5f}, KV_F16);
    const Packed& w = e.matrix(e.add_matrix(type, data.data(), (int64_t)data.size(), n, width, 0));
    int nb32 = width / 32;
    QRows a{};
    Pages pages = quant_pages(rows, width, fine, a);
    a.group = row_group(rows);
    if (KIND[w.kind].quantised)
        for (int64_t r = 0; r < rows; r++)
            k.quantise(x.data() + r * width, width, a.at_block(a.first_block(r, nb32)));
    int64_t ld = w.panels * 16;
    std::vector<float> out((size_t)rows * ld);
    for (int64_t r = 0; r < rows; r += MM_ROWS) {
        k.mm[w.kind](w, 0, w.panels, a.at_block(a.first_block(r, nb32)), x.data() + r * width,
                     nullptr, (int)std::min<int64_t>(MM_ROWS, rows - r), out.data() + r * ld, ld,
                     nullptr);
    }
    float* y = new float[(size_t)rows * n];
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * n, out.data() + r * ld, (size_t)n * 4);
    nb::capsule owner(y, [](void* p) noexcept { delete[] (float*)p; });
    return nb::cast(
        nb::ndarray<nb::numpy, float, nb::ndim<2>>(y, {(size_t)rows, (size_t)n}, owner));
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of Verbatim's CPU backend.";
    m.def("isas", &supported_isas, "Instruction sets that this machine supports, fastest last.");
    m.def("best_isa", [] { return supported_isas().back(); });
    m.def(
        "digests",
        [](const std::string& isa, int threads) {
            nb::dict out;
            const Kernels& k = select_isa(isa);
            std::vector<std::pair<std::string, uint64_t>> found;
            {
                nb::gil_scoped_release nogil;
                found = digests(k, threads);
            }
            for (auto& [name, value] : found) {
                char hex[17];
                std::snprintf(hex, sizeof hex, "%016llx", (unsigned long long)value);
                out[name.c_str()] = nb::str(hex);
            }
            return out;
        },
        nb::arg("isa"), nb::arg("threads") = 2,
        "Digests of every kernel and of small models; equal on every instruction set.");
    m.def("product", &product, nb::arg("isa"), nb::arg("type"), nb::arg("data"), nb::arg("n"),
          nb::arg("x"), nb::arg("fine") = false,
          "x [rows, k] times the transpose of an [n, k] matrix of GGUF blocks; for tests.");
    m.def(
        "rope_tables",
        [](int64_t position, Doubles f, double factor) {
            std::vector<float> c(f.size()), s(f.size());
            rope_angles(position, f.data(), (int)f.size(), factor, c.data(), s.data());
            return nb::make_tuple(c, s);
        },
        "cos and sin of one position, for tests.");
    nb::class_<Mesh>(m, "Mesh")
        .def(nb::init<int, std::vector<int>>(), nb::arg("rank"), nb::arg("fds"))
        .def_prop_ro("rank", &Mesh::rank)
        .def("waits", &Mesh::waits)
        .def(
            "broadcast",
            [](Mesh& mesh, nb::bytes data) {
                nb::gil_scoped_release nogil;
                mesh.broadcast(data.data(), data.size());
            })
        .def("gather", &gather, nb::arg("piece"), nb::arg("sizes"), nb::arg("root") = false,
             "The pieces of all ranks, one after the other; sizes[r] bytes of rank r.");
    bind_sampler(m);
    nb::class_<PyEngine>(m, "Engine")
        .def(nb::init<const std::string&, int, int, int, int, int, int, const std::string&, bool,
                      float, const std::string&, bool, PyEngine*, Mesh*>(),
             nb::keep_alive<1, 14>(), nb::keep_alive<1, 15>(), nb::kw_only(), nb::arg("isa"), nb::arg("threads"), nb::arg("vocab"), nb::arg("hidden"),
             nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("activation"),
             nb::arg("layer_norm"), nb::arg("eps"), nb::arg("kv_type"), nb::arg("fine") = false,
             nb::arg("target").none() = nb::none(), nb::arg("mesh").none() = nb::none())
        .def("matrix", &PyEngine::matrix, nb::arg("type"), nb::arg("data"), nb::arg("rows"),
             nb::arg("k"), nb::arg("group") = 0)
        .def("share", [](PyEngine& e, PyEngine& target,
                         int number) { return e.engine_.share_matrix(target.engine_, number); })
        .def("states", &PyEngine::states)
        .def("read_cache_of", &PyEngine::read_cache_of)
        .def("runs_with", [](PyEngine& e, int width) { e.runs_with_ = width; })
        .def("captured", [](nb::handle self) { return nb::cast<PyEngine&>(self).captured(self); })
        .def("vector", &PyEngine::vector)
        .def("rope", &PyEngine::rope)
        .def("buffer", [](PyEngine& e, int width) { return e.engine_.add_buffer(width); })
        .def("lora", &PyEngine::lora)
        .def("group", &PyEngine::group, nb::arg("window"), nb::arg("layers"), nb::arg("kind") = 0,
             nb::arg("floats") = 0, nb::arg("kv_heads") = 0, nb::arg("head_dim") = 0)
        .def("op", &PyEngine::op)
        .def("finish", &PyEngine::finish)
        .def("block_bytes", &PyEngine::block_bytes)
        .def("allocate", &PyEngine::allocate)
        .def("copy", &PyEngine::copy)
        .def("read_block", &PyEngine::read_block)
        .def("write_block", &PyEngine::write_block)
        .def("step", &PyEngine::step, nb::arg("sequences"), nb::arg("frame") = nb::bytes("", 0))
        .def("logits", [](nb::handle self) { return nb::cast<PyEngine&>(self).logits(self); })
        .def("hidden", [](nb::handle self) { return nb::cast<PyEngine&>(self).hidden(self); })
        .def("argmax", &PyEngine::argmax)
        .def(
            "sample",
            [](PyEngine& e, nb::list rows, size_t first) {
                const Engine& engine = e.engine_;
                if (first > engine.step.logits.size() ||
                    nb::len(rows) > engine.step.logits.size() - first)
                    throw std::invalid_argument("sample() has more entries than rows of logits");
                const int64_t vocab = engine.shape.vocab;
                const int64_t chunks = (vocab + vb::CHUNK - 1) / vb::CHUNK;
                return sample_rows(e.engine_.pool(), engine.kernels.sample,
                                   engine.logits() + (int64_t)first * vocab,
                                   engine.chunk_maxes() + (int64_t)first * chunks, vocab, rows);
            },
            nb::arg("rows"), nb::arg("first") = 0,
            "Samples or scores rows of the last step's logits, from row `first` on.")
        .def_prop_ro("threads", [](PyEngine& e) { return e.engine_.threads(); })
        .def_prop_ro("isa", [](PyEngine& e) { return std::string(e.engine_.kernels.name); })
        .def_prop_ro("weight_bytes", [](PyEngine& e) { return e.engine_.weight_bytes(); });
}
