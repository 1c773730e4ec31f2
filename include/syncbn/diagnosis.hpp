// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "syncbn/export.h"

namespace syncbn {

/// Returns the name of the vector code in use on the CPU: "avx512_bf16", "avx512", "avx2", "neon"
/// or "reference". It never affects results.
SYNCBN_API const char* cpu_instruction_set();

/// Chooses the vector code, for tests and diagnosis. Returns false and changes nothing if this
/// build or this processor does not have it. Do not call this while a call of a layer runs.
SYNCBN_API bool force_cpu_instruction_set(const char* name);

}  // namespace syncbn
