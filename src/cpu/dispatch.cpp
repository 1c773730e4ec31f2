// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>

#include "cpu/kernels.hpp"
#include "syncbn/diagnosis.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace syncbn {
namespace cpu {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports does not know these names in clang 14.
bool has_f16c() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
bool has_avx512_bf16() {
  constexpr unsigned int kBit = 1U << 5;
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kBit) != 0;
}
#endif

bool processor_has(const Kernels* kernels) {
#if defined(__x86_64__)
  if (kernels == nullptr) {
    return false;
  }
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (kernels == kAvx2Kernels) {
    return avx2;
  }
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw");
  return avx512 && (kernels == kAvx512Kernels || has_avx512_bf16());
#else
  (void)kernels;
  return false;
#endif
}

const Kernels* best_kernels() {
  return processor_has(kAvx512Bf16Kernels) ? kAvx512Bf16Kernels
         : processor_has(kAvx512Kernels)   ? kAvx512Kernels
         : processor_has(kAvx2Kernels)     ? kAvx2Kernels
                                           : nullptr;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{best_kernels()};
  return kernels;
}

}  // namespace

const Kernels* active_kernels() { return chosen().load(std::memory_order_relaxed); }

bool force_instruction_set(const char* name) {
  if (std::strcmp(name, "reference") == 0) {
    chosen() = nullptr;
    return true;
  }
  for (const Kernels* kernels : {kAvx2Kernels, kAvx512Kernels, kAvx512Bf16Kernels}) {
    if (processor_has(kernels) && std::strcmp(name, kernels->name) == 0) {
      chosen() = kernels;
      return true;
    }
  }
  return false;
}

const char* instruction_set() {
  const Kernels* kernels = active_kernels();
  return kernels == nullptr ? "reference" : kernels->name;
}

}  // namespace cpu

const char* cpu_instruction_set() { return cpu::instruction_set(); }
bool force_cpu_instruction_set(const char* name) { return cpu::force_instruction_set(name); }

}  // namespace syncbn
