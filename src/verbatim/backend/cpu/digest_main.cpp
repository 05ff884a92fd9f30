// Prints the digests of one instruction set, or of all this machine has: `digest [isa]`. Needs no Python, so that it runs under an emulator too.
#include <cinttypes>
#include <cstdio>

#include "isa.h"
#include "selftest.h"

int main(int argc, char** argv) {
    std::vector<std::string> isas = verbatim::supported_isas();
    if (argc > 1) isas = {argv[1]};
    for (auto& isa : isas)
        for (auto& [name, value] : verbatim::digests(verbatim::select_isa(isa), 2)) std::printf("%s\t%s\t%016" PRIx64 "\n", isa.c_str(), name.c_str(), value);
    return 0;
}
