// Digests of every kernel and of whole small models on made-up numbers. The same on every instruction set, or a kernel is wrong.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace verbatim {
std::vector<std::pair<std::string, uint64_t>> digests(const Kernels& k, int threads);
}  // namespace verbatim
