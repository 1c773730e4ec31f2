// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "statistics/header.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/error.hpp"
#include "tensors/checks.hpp"

// What the ranks of a group must have in common, and what they say when they do not.
namespace syncbn {

/// One rank's call of a layer. forward: of a backward, the forward's fingerprint.
struct AgreedCall {
  const BatchNorm::Options* options = nullptr;
  Place place;
  Direction direction = Direction::kForward;
  std::string_view name;
  std::uint64_t layer = 0;  ///< its number, from the name
  std::uint64_t call = 0;
  std::int64_t channels = 0;
  DType dtype = DType::kFloat32;
  bool elements = false;  ///< a rank without any does not know the group's dtype
  bool residual = false;  ///< whether there is one, as of the next two
  bool weight = false;
  bool bias = false;
  std::uint32_t forward = 0;
};

/// Throws unless the merged header says that all ranks made the same call. A DivergenceError says
/// which of its fields differ, and on which ranks: all ranks come here, because they see the same
/// header, and make one more all_reduce_sum.
void check_agreement(const MessageInfo& info, const AgreedCall& own, Communicator& communicator);

/// After a DivergenceError of the communicator, whose messages did not fit each other: as above,
/// or `error` itself, where a rank was in no layer's exchange.
[[noreturn]] void explain_divergence(const DivergenceError& error, const AgreedCall& own,
                                     Communicator& communicator);

}  // namespace syncbn
