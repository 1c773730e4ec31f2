// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "emulator.hpp"

// Tells tests how many kernels were launched.
namespace {

std::int64_t launches() { return static_cast<std::int64_t>(syncbn::emulation::counts().launches); }

}  // namespace

STABLE_TORCH_LIBRARY(syncbn_emulated, m) { m.def("launches() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(syncbn_emulated, CompositeExplicitAutograd, m) {
  m.impl("launches", TORCH_BOX(&launches));
}
