#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>

#include "bindings/torch/no_memory.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace syncbn::torch_layer {

/// An uninitialized tensor like x (its dtype, and its layout where it is dense). Large ones ask for
/// huge pages before their first store: faulting in 4 KiB pages costs more than the arithmetic.
inline torch::stable::Tensor new_output(const torch::stable::Tensor& x) {
  const std::uintptr_t bytes = static_cast<std::uintptr_t>(x.numel()) * x.element_size();
  torch::stable::Tensor out = [&] {
    try {
      return torch::stable::empty_like(x);
    } catch (const std::runtime_error&) {
      throw NoMemory(bytes);
    }
  }();
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::uintptr_t kAtLeast = std::uintptr_t{4} << 20;
  if (bytes >= kAtLeast && out.is_cpu()) {
    const auto begin =
        (reinterpret_cast<std::uintptr_t>(out.mutable_data_ptr()) + kPage - 1) / kPage * kPage;
    const auto end =
        (reinterpret_cast<std::uintptr_t>(out.mutable_data_ptr()) + bytes) / kPage * kPage;
    // Only advice: where the kernel refuses, small pages serve.
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return out;
}

}  // namespace syncbn::torch_layer
