// Prints the digests of one instruction set ("auto": the fastest), or of all that this machine
// supports: `digest [isa]`. Needs no Python, so it also runs under an emulator.
#include <cinttypes>
#include <cstdio>
#include <stdexcept>

#include "isa.h"
#include "selftest.h"

int main(int argc, char** argv) {
    std::vector<std::string> isas = verbatim::supported_isas();
    if (argc > 1) isas = {argv[1]};
    try {
        for (auto& isa : isas) {
            const verbatim::Kernels& kernels = verbatim::select_isa(isa);
            for (auto& [name, value] : verbatim::digests(kernels, 2))
                std::printf("%s\t%s\t%016" PRIx64 "\n", kernels.name, name.c_str(), value);
        }
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    return 0;
}
