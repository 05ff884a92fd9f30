// Digests of every kernel and of small complete models on synthetic inputs. They must be equal on
// every instruction set.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace verbatim {
std::vector<std::pair<std::string, uint64_t>> digests(const Kernels& k, int threads);
}  // namespace verbatim
