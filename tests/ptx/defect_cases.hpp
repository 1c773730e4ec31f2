// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// What defects_check.cpp runs with each defect.
namespace syncbn::ptx {

using Bytes = std::vector<std::int64_t>;

struct Case {
  std::string name;
  std::function<Bytes()> run;
  Bytes expected;
};

/// The sums of one tensor, forward and backward, and welford's, which have all of the fences,
/// barriers and shuffles; and a few passes that only store.
std::vector<Case> all_cases();

}  // namespace syncbn::ptx
