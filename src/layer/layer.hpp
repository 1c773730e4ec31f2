// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "comm/group_link.hpp"
#include "layer/block.hpp"
#include "syncbn/batch_norm.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/step.hpp"
#include "tensors/checks.hpp"

// What a layer is inside, and what its calls on CPU and on CUDA have in common.
namespace syncbn {

struct LayerState {
  LayerState(const BatchNorm::Options& given, const Allocator& allocator)
      : name(given.name),
        options(given),
        counters(allocator),
        sums(allocator),
        scratch(allocator),
        activation_mask(allocator) {
    options.name = name;
  }
  ~LayerState();
  LayerState(const LayerState&) = delete;
  LayerState& operator=(const LayerState&) = delete;

  /// Throws InvalidArgument if another layer of the communicator has it.
  void take_name();

  /// Throws InvalidArgument if the group is gone.
  void need_group() const;

  /// Forgets the calls before the group's last reset, and this rank's place.
  void see_reset() noexcept;

  /// Throws InvalidArgument if the place is another than before, with no reset in between.
  void see_place(const Place& now);

  std::string name;
  BatchNorm::Options options;
  std::uint64_t number = 0;  ///< from the name; of one without a name its own in this process
  std::uint64_t calls = 0;   ///< forwards so far, since the group's last reset
  // The group: one of the two, or, alone, that of one rank on either device.
  Communicator* on_cpu = nullptr;
  cuda::Communicator* on_cuda = nullptr;
  bool alone = false;
  Place place;  ///< in the group, as it was when the layer was made, or after a reset
  detail::GroupLink<Communicator> cpu_link;  ///< whether it is still there
  detail::GroupLink<cuda::Communicator> cuda_link;

  // On CUDA.
  Block counters;  ///< calls, and the last one's info
  Block sums;      ///< zero between calls
  Block scratch;
  Block activation_mask;  ///< of a backward of an evaluation

 private:
  std::uint64_t beginnings_ = 0;  ///< of the group, as far as this layer knows
  bool placed_ = false;
  const void* name_taken_for_ = nullptr;
};

struct SavedState {
  explicit SavedState(const Allocator& allocator) : block(allocator) {}

  /// Room for the statistics of x's channels and, where `masked`, an activation mask of x.
  void reserve(const TensorView& x, bool masked, void* on_stream);

  /// What a backward is held to, of a forward that has ended.
  void keep(const BatchNorm::Forward& f);

  Block block;
  bool filled = false;  ///< a forward has ended
  Device device = Device::kCpu;
  void* stream = nullptr;
  std::int64_t channels = 0;
  double* mean = nullptr;
  double* var = nullptr;
  double* rstd = nullptr;
  std::int64_t* info = nullptr;  ///< kInfoWords words
  std::uint8_t* activation_mask = nullptr;
  std::uint64_t layer = 0;  ///< its number
  std::uint64_t call = 0;
  TensorView x;
  const void* y = nullptr;
  bool mask = false;  ///< whether there was one, as of the next ones
  bool weight = false;
  bool bias = false;
  bool residual = false;
  /// What was written to x's memory; null: nothing that the layer knows of.
  mutable const char* overwritten_by = nullptr;
};

/// One call of a layer, as errors name it.
struct LayerCall {
  const LayerState& layer;
  std::optional<std::uint64_t> number;  ///< of a training call
  const char* direction;
  const TensorView& x;

  /// "stem.bn1, call 3, forward, 64 channels, float32"; empty for a layer without a name.
  std::string text() const;
  /// The text that the others get of an exception which is no Error.
  std::string with_reason(const char* reason) const;
};

/// Runs what belongs to a call; the errors carry its layer.
template <class Body>
void in_call(const LayerCall& call, const Body& body) {
  try {
    body();
  } catch (Error& error) {
    if (!call.layer.name.empty()) {
      error.set_layer(call.layer.name, call.text());
    }
    throw;
  }
}

/// Runs what comes before an exchange, or in the middle of it. A rank that fails there tells the
/// others, which would otherwise wait for it.
template <class Group, class Body>
void before_exchange(Group& communicator, const LayerCall& call, const Body& body) {
  try {
    in_call(call, body);
  } catch (const Error& error) {
    communicator.refuse(error.what());
    throw;
  } catch (const std::exception& error) {
    communicator.refuse(call.with_reason(error.what()));
    throw;
  } catch (...) {  // an executor is the caller's
    communicator.refuse(call.with_reason("an exception of an unknown type"));
    throw;
  }
}

void forward_on_cpu(LayerState& layer, const LayerCall& call, const BatchNorm::Forward& f,
                    SavedState& saved, const Execution& execution);
void forward_on_cuda(LayerState& layer, const LayerCall& call, const BatchNorm::Forward& f,
                     SavedState& saved, const Execution& execution);
void backward_on_cpu(LayerState& layer, const LayerCall& call, const BatchNorm::Backward& b,
                     const SavedState& saved, const Execution& execution);
void backward_on_cuda(LayerState& layer, const LayerCall& call, const BatchNorm::Backward& b,
                      const SavedState& saved, const Execution& execution);
void evaluate(LayerState& layer, const BatchNorm::Evaluate& e, const Execution& execution);
void evaluate_backward(LayerState& layer, const BatchNorm::EvaluateBackward& e,
                       const Execution& execution);
/// The last call's count on CUDA, when all that was enqueued before is done.
void check_last_call(LayerState& layer, const Execution& execution);

void check_options(const BatchNorm::Options& options);

/// check_forward, and that the running statistics come together.
void check_layer_forward(const BatchNorm::Options& options, const BatchNorm::Forward& f);

/// What a backward is given of its forward.
void check_saved(const SavedState& saved, const LayerState& layer, const BatchNorm::Backward& b);

void check_evaluate(const BatchNorm::Options& options, const BatchNorm::Evaluate& e);
void check_evaluate_backward(const BatchNorm::Options& options,
                             const BatchNorm::EvaluateBackward& e);

}  // namespace syncbn
