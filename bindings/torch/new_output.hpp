// SPDX-License-Identifier: Apache-2.0
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
    if (x.is_contiguous() && x.is_cpu()) {  // without the dispatcher, which takes 1 us
      std::int32_t dtype = 0;
      AtenTensorHandle made = nullptr;
      const auto sizes = x.sizes();
      const auto strides = x.strides();
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
      if (aoti_torch_empty_strided(x.dim(), sizes.data(), strides.data(), dtype,
                                   aoti_torch_device_type_cpu(), 0, &made) != 0) {
        throw NoMemory(bytes);
      }
      return torch::stable::Tensor(made);
    }
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
