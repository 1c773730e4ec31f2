// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <string>

#include "syncbn/diagnosis.hpp"

// The library, and operators about it as a whole. Others are defined where they are implemented.
namespace syncbn::torch_layer {
namespace {

std::string cpu_instruction_set() { return syncbn::cpu_instruction_set(); }

bool force_cpu_instruction_set(std::string name) {
  return syncbn::force_cpu_instruction_set(name.c_str());
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY(syncbn, m) {
  m.def("cpu_instruction_set() -> str");
  m.def("force_cpu_instruction_set(str name) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  using namespace syncbn::torch_layer;
  m.impl("cpu_instruction_set", TORCH_BOX(&cpu_instruction_set));
  m.impl("force_cpu_instruction_set", TORCH_BOX(&force_cpu_instruction_set));
}
