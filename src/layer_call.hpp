#pragma once

#include <cstdint>
#include <exception>

#include "syncbn/batch_norm.hpp"

// What a layer's call on CPU and on CUDA have in common.
namespace syncbn {

/// Runs what comes before an exchange, or in the middle of it. A rank that fails there tells the
/// others, which would otherwise wait for it.
template <class Group, class Body>
void before_exchange(Group& communicator, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    communicator.abandon(error.what());
    throw;
  } catch (...) {  // an executor is the caller's
    communicator.abandon("an exception of an unknown type");
    throw;
  }
}

/// The arguments of a backward with constant statistics.
void check_evaluate_backward(const TensorView& dy, const TensorView& x, const MaskView& mask,
                             const TensorView& residual, const MutableTensorView& dx,
                             const MutableTensorView& dweight, const MutableTensorView& dbias,
                             const MutableTensorView& dresidual, const BatchNormOptions& options);

/// Both running statistics, or with `may_be_absent` neither: true if they are there.
bool check_running(const TensorView& running_mean, const TensorView& running_var,
                   bool may_be_absent);

}  // namespace syncbn
