// Runs a model without Python, for processors that are available only as an emulator: `model FILE
// [isa]`. FILE, written by model_file.py, holds the shape of the engine, its weights and program,
// and a prompt that is continued greedily. Prints the logits of every step as raw floats.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "engine.h"
#include "isa.h"

using namespace verbatim;

namespace {

FILE* in;

std::string word() {
    char s[64];
    if (fscanf(in, "%63s", s) != 1) throw std::runtime_error("the file ends early");
    return s;
}
int64_t integer() { return std::strtoll(word().c_str(), nullptr, 10); }
double real() {
    return std::strtod(word().c_str(), nullptr);
}  // hexadecimal, so nothing is rounded

std::vector<int> list() {
    std::vector<int> out((size_t)integer());
    for (int& x : out) x = (int)integer();
    return out;
}

template <class T> std::vector<T> array() {  // a count, a line break, the values
    std::vector<T> out((size_t)integer());
    fgetc(in);
    if (fread(out.data(), sizeof(T), out.size(), in) != out.size())
        throw std::runtime_error("an array ends early");
    return out;
}

Shape read_shape() {
    Shape s{};
    for (int* x : {&s.vocab, &s.hidden, &s.heads, &s.kv_heads, &s.head_dim, &s.activation})
        *x = (int)integer();
    s.layer_norm = integer() != 0;
    s.eps = (float)real();
    return s;
}

Op read_op() {
    Op o{};
    o.type = (OpType)integer();
    for (int* x : {&o.src, &o.dst, &o.norm, &o.norm_bias, &o.layer, &o.rope, &o.qnorm, &o.knorm})
        *x = (int)integer();
    for (int* xs : {o.mat, o.bias})
        for (int i = 0; i < 3; i++) xs[i] = (int)integer();
    o.add = integer() != 0;
    o.outputs = integer() != 0;
    o.scale = (float)real();
    o.softcap = (float)real();
    return o;
}

void matrix(Engine& e) {
    std::string type = word();
    int64_t rows = integer(), k = integer(), group = integer();
    auto data = array<uint8_t>();
    e.add_matrix(type, data.data(), (int64_t)data.size(), rows, k, (int)group);
}

void one_step(Engine& e, const std::vector<int>& tokens, int start) {
    Step& s = e.step = Step{};
    const int rows = (int)tokens.size();
    std::vector<int32_t> table;
    for (int b = 0; b * BLOCK < start + rows; b++) table.push_back(b);
    s.sequences.push_back({0, rows, start, {table}});
    for (int i = 0; i < rows; i++) {
        s.tokens.push_back(tokens[i]);
        s.positions.push_back(start + i);
        s.sequence.push_back(0);
    }
    s.outputs = {rows - 1};
    s.logits = {0};
    e.run();
}

void generate(Engine& e) {
    int count = (int)integer(), start = 0;
    std::vector<int> tokens = list();
    e.allocate({(start + (int64_t)tokens.size() + count) / BLOCK + 1});
    for (int i = 0; i < count; i++) {
        one_step(e, tokens, start);
        fwrite(e.logits(), 4, (size_t)e.shape.vocab, stdout);
        fflush(stdout);
        start += (int)tokens.size();
        int32_t next;
        e.argmax(0, &next);
        tokens = {next};
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2 || !(in = fopen(argv[1], "rb"))) return 2;
    const Kernels& kernels = select_isa(argc > 2 ? argv[2] : "");
    fprintf(stderr, "%s\n", kernels.name);
    const Shape shape = read_shape();
    Engine e(kernels, 2, shape, KV_F16, integer() != 0);
    for (std::string what = word();; what = word()) {
        if (what == "matrix") matrix(e);
        else if (what == "vector") {
            auto v = array<float>();
            e.add_vector(v.data(), (int64_t)v.size());
        } else if (what == "rope") {
            double factor = real();
            auto v = array<double>();
            e.add_rope(v.data(), (int)v.size(), factor);
        } else if (what == "buffer") e.add_buffer((int)integer());
        else if (what == "group") {
            int window = (int)integer(), kv_heads = (int)integer(), head_dim = (int)integer();
            e.add_group(window, list(), G_ATTENTION, 0, kv_heads, head_dim);
        } else if (what == "op") e.add_op(read_op());
        else if (what == "finish") e.finish();
        else if (what == "generate") return generate(e), 0;
        else throw std::runtime_error("no such line: " + what);
    }
}
