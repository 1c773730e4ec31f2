// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace syncbn::emulation {

/// What an access or fence says of order.
struct Order {
  bool strong = false;  ///< relaxed, volatile and atomics
  bool acquire = false;
  bool release = false;
  bool sequential = false;   ///< fence.sc, membar
  bool block_scope = false;  ///< .cta: for threads of the same block alone
  bool system = false;       ///< .sys: for those of other devices, too
};

}  // namespace syncbn::emulation
