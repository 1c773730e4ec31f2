// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/torch/backward_ops.hpp"
#include "bindings/torch/exchange.hpp"
#include "bindings/torch/tensors.hpp"
#include "syncbn/diagnosis.hpp"
#include "syncbn/step.hpp"

// The library, and operators about it as a whole and about messages. Others are defined where they
// are implemented.
namespace syncbn::torch_layer {
namespace {

/// The vector code in use, after that of this name was chosen, if this processor has it.
std::string cpu_instruction_set(std::optional<std::string> name) {
  if (name.has_value()) {
    syncbn::force_cpu_instruction_set(name->c_str());
  }
  return syncbn::cpu_instruction_set();
}

/// The numbers that python/syncbn/operators.py names, in its order.
std::vector<std::int64_t> constants() {
  std::vector<std::int64_t> out{
      kAlone,       kMessage,        kFramed,   kOwn,         kU,
      kShare,       kDone,           kPending,  kTimeout,     kLost,
      kDiverged,    kUnchecked,      kNoMemory, kHeaderWords, kFrameWords,
      kHeaderFlags, kHeaderBackward, kRejected, kMaxRanks,    kSlice.count()};
  for (int dtype = 0; dtype < kDtypeCount; ++dtype) {
    out.push_back(message_words(static_cast<DType>(dtype), 1) - kHeaderWords);
  }
  return out;
}

/// Count, whether the ranks agree, whether one has refused, and the dtype's number or -1.
Tensor header(const Tensor& merged, std::int64_t ranks) {
  const MessageInfo info =
      syncbn::read_header(int64_data("merged", merged, kHeaderWords), ranks_of(ranks));
  Tensor out = empty(merged, 4, ScalarType::Long);
  std::int64_t* data = int64_data("out", out, 4);
  data[0] = info.count;
  data[1] = info.agree ? 1 : 0;
  data[2] = info.any_rejected ? 1 : 0;
  data[3] = info.any_data ? static_cast<std::int64_t>(info.dtype) : -1;
  return out;
}

}  // namespace
}  // namespace syncbn::torch_layer

STABLE_TORCH_LIBRARY(syncbn, m) {
  m.def("cpu_instruction_set(str? name=None) -> str");
  m.def("cumulative_factor(float batches) -> float");
  m.def("constants() -> int[]");
  m.def("header(Tensor merged, int ranks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&syncbn::torch_layer::cpu_instruction_set));
  m.impl("constants", TORCH_BOX(&syncbn::torch_layer::constants));
  m.impl("cumulative_factor", TORCH_BOX(&syncbn::cumulative_factor));
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, m) {
  m.impl("header", TORCH_BOX(&syncbn::torch_layer::header));
}
