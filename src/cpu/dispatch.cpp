// SPDX-License-Identifier: Apache-2.0
#include <array>
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

struct Level {
  const Kernels* kernels;
  bool available;  ///< on this processor
};

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

/// The best one first.
std::array<Level, 3> levels() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw");
  return {{{kAvx512Bf16Kernels, avx512 && has_avx512_bf16()},
           {kAvx512Kernels, avx512},
           {kAvx2Kernels, avx2}}};
}
#elif defined(__aarch64__)
std::array<Level, 1> levels() { return {{{kNeonKernels, true}}}; }
#else
std::array<Level, 0> levels() { return {}; }
#endif

const Kernels* best_kernels() {
  for (const Level& level : levels()) {
    if (level.available) {
      return level.kernels;
    }
  }
  return nullptr;
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
  for (const Level& level : levels()) {
    if (level.available && std::strcmp(name, level.kernels->name) == 0) {
      chosen() = level.kernels;
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
