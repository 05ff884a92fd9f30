// Runtime dispatch: the instruction sets that this machine supports, and the kernel table of one.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace verbatim {
std::vector<std::string> supported_isas();  // fastest last
// "" or "auto" selects the fastest. Throws std::invalid_argument for an unsupported name.
const Kernels& select_isa(const std::string& name);
}  // namespace verbatim
