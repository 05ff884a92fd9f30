// Which instruction sets this machine can run, and the table of one of them.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace verbatim {
std::vector<std::string> supported_isas();           // best last
const Kernels& select_isa(const std::string& name);  // "" or "auto": the best; throws std::invalid_argument
}  // namespace verbatim
