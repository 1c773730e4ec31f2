// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "syncbn/export.hpp"

namespace syncbn {

/// The vector code in use on CPU: "avx512_bf16", "avx512", "avx2", "neon" or "reference". It never
/// affects results.
SYNCBN_API const char* cpu_instruction_set();

/// Chooses the vector code, for tests and diagnosis: false, and no change, if this build or this
/// processor does not have it. Not to be called while a pass runs.
SYNCBN_API bool force_cpu_instruction_set(const char* name);

}  // namespace syncbn
