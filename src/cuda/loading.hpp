// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "syncbn/tensor.hpp"

// CUDA brings a kernel's code to a device at its first launch, and may wait for all that runs there
// to do so. An exchange that runs there waits for the other ranks, and these perhaps for this one.
// So all kernels are loaded before the first exchange: one rank may train while another evaluates.
namespace syncbn::cuda {

/// Loads the kernels for x of this dtype, once for each device. Called by the passes that come
/// before an exchange.
void load_kernels(DType dtype);

// What the files of kernels have of them.
void load_moments(DType dtype);
void load_gradient_sums(DType dtype);
void load_welford(DType dtype);
void load_finalize(DType dtype);
void load_normalize(DType dtype);
void load_input_gradient(DType dtype);
void load_recover_input(DType dtype);

}  // namespace syncbn::cuda
