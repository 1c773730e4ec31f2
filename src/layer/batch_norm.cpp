// SPDX-License-Identifier: Apache-2.0
#include "syncbn/batch_norm.hpp"

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "layer/layer.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "tensors/checks.hpp"

// The layer's face: its name, its calls and their device. What a direction does is in layer.cpp.
namespace syncbn {
namespace {

/// A program that was compiled with an older header brings fewer members, which a later version
/// of this function fills up. One with a newer header asks for what this library does not have.
void check_size(const char* name, std::size_t size, std::size_t expected) {
  if (size != expected) {
    throw Unavailable(std::string(name) + ": got " + std::to_string(size) +
                      " bytes, expected the " + std::to_string(expected) +
                      " of this library's version; compile the program with its headers");
  }
}

/// Names of the layers of each communicator that has several ranks.
class Names {
 public:
  static Names& all() {
    static Names names;
    return names;
  }
  void take(const void* communicator, const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (!taken_.emplace(communicator, name).second) {
      throw InvalidArgument("options.name: got " + name +
                            ", which another layer of this group has, expected a name of its own");
    }
  }
  void give_back(const void* communicator, const std::string& name) {
    const std::lock_guard lock(mutex_);
    taken_.erase({communicator, name});
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<const void*, std::string>> taken_;
};

bool on_cuda(const LayerState& layer, const TensorView& x) {
  return layer.on_cpu == nullptr || (layer.alone && x.device == Device::kCuda);
}

/// A layer of one rank has its communicator for CUDA from the first such call on.
void need_cuda(LayerState& layer) {
  if (layer.on_cuda == nullptr) {
    layer.on_cuda = &cuda::self_communicator();
  }
}

/// A layer's number, from its name: FNV-1a, 64 bits, never 0; see "The FNV Non-Cryptographic Hash
/// Algorithm" (RFC 9923). Layers without one, which have one rank, get a number each.
std::uint64_t number_of(const std::string& name) {
  static std::atomic<std::uint64_t> unnamed{0};
  if (name.empty()) {
    return ++unnamed;
  }
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  return hash == 0 ? 1 : hash;
}

/// What does not depend on a call.
void check_layer(const BatchNorm::Options& options, int ranks) {
  check_ranks(ranks);
  if (options.name.empty() && ranks > 1) {
    throw InvalidArgument(
        "options.name: got none, expected this layer's own name, the same on all ranks (there "
        "are " +
        std::to_string(ranks) + " ranks)");
  }
  check_channels(options.channels);
  check_options(options);
}

}  // namespace

void LayerState::take_name() {
  const void* const group = on_cpu != nullptr ? cpu_link.identity() : cuda_link.identity();
  Names::all().take(group, name);
  name_taken_for_ = group;
}

void LayerState::need_group() const {
  if (alone) {
    return;
  }
  if (on_cpu != nullptr) {
    cpu_link.get();
  } else {
    cuda_link.get();
  }
}

void LayerState::see_reset() noexcept {
  const std::uint64_t now = cpu_link.beginnings();
  if (now != beginnings_) {
    beginnings_ = now;
    calls = 0;
    placed_ = false;
  }
}

void LayerState::see_place(const Place& now) {
  if (placed_ && now != place) {
    const auto text = [](const Place& p) {
      return "rank " + std::to_string(p.rank) + " of " + std::to_string(p.ranks);
    };
    refuse("communicator", text(now), text(place) + ", as in the calls before");
  }
  place = now;
  placed_ = true;
}

LayerState::~LayerState() {
  if (name_taken_for_ != nullptr) {
    Names::all().give_back(name_taken_for_, name);
  }
}

std::string LayerCall::text() const {
  if (layer.name.empty()) {
    return {};
  }
  std::string text = layer.name;
  if (number.has_value()) {
    text += ", call " + std::to_string(*number);
  }
  text += std::string(", ") + direction;
  if (x.sizes.size() > 1 && static_cast<int>(x.dtype) < kDtypeCount) {
    text += ", " + std::to_string(x.sizes[1]) + " channels, " + syncbn::name(x.dtype);
  }
  return text;
}

std::string LayerCall::with_reason(const char* reason) const {
  const std::string call = text();
  return call.empty() ? reason : call + ": " + reason;
}

void SavedState::reserve(const TensorView& x, bool masked, void* on_stream) {
  filled = false;
  device = x.device;
  stream = on_stream;
  channels = x.sizes[1];
  const std::int64_t mask_bytes = masked ? activation_mask_bytes(x) : 0;
  const std::int64_t numbers = 3 * channels + kInfoWords;
  auto* const memory = static_cast<std::byte*>(
      block.reserve(static_cast<std::size_t>(8 * numbers + mask_bytes), device, stream));
  mean = reinterpret_cast<double*>(memory);
  var = mean + channels;
  rstd = var + channels;
  info = reinterpret_cast<std::int64_t*>(rstd + channels);
  activation_mask = masked ? reinterpret_cast<std::uint8_t*>(info + kInfoWords) : nullptr;
}

void SavedState::keep(const BatchNorm::Forward& f) {
  x = f.x;
  y = f.y.data;
  mask = !f.mask.absent();
  weight = !f.weight.absent();
  bias = !f.bias.absent();
  residual = !f.residual.absent();
  overwritten_by = x.data == y ? "the forward wrote y to" : nullptr;
  filled = true;
}

Saved::Saved(const Allocator& allocator) : state_(std::make_shared<SavedState>(allocator)) {
  check_allocator(allocator);
}
std::span<const double> Saved::values(std::size_t which) const noexcept {
  if (state_ == nullptr || !state_->filled) {
    return {};
  }
  const auto channels = static_cast<std::size_t>(state_->channels);
  return {state_->mean + which * channels, channels};
}
std::int64_t Saved::count() const {
  if (state_ == nullptr || !state_->filled) {
    return 0;
  }
  return state_->device == Device::kCpu
             ? state_->info[0]
             : cuda::read_count(state_->info, cuda::Stream{state_->stream});
}

BatchNorm::BatchNorm(const Options& options, std::size_t size, Communicator* communicator,
                     cuda::Communicator* cuda_communicator, const Allocator& allocator) {
  const auto make = [&](const Place& place) {
    check_size("options", size, sizeof(options));
    check_allocator(allocator);
    check_layer(options, place.ranks);
    state_ = std::make_shared<LayerState>(options, allocator);
    state_->number = number_of(state_->name);
    if (communicator != nullptr) {
      state_->on_cpu = communicator;
      state_->cpu_link = detail::GroupLink(*communicator);
      state_->see_reset();
    } else if (cuda_communicator != nullptr) {
      state_->on_cuda = cuda_communicator;
      state_->cuda_link = detail::GroupLink(*cuda_communicator);
    }
    state_->see_place(place);
    if (place.ranks > 1) {
      state_->take_name();
    }
  };
  const auto of_group = [&](auto& group) {  // the others would wait for a layer that is not there
    try {
      make(place_of(group));
    } catch (Error& error) {
      if (!options.name.empty()) {
        error.set_layer(std::string(options.name), std::string(options.name));
      }
      group.refuse(error.what());
      throw;
    } catch (const std::exception& error) {
      group.refuse(error.what());
      throw;
    }
  };
  if (communicator != nullptr) {
    of_group(*communicator);
  } else if (cuda_communicator != nullptr) {
    of_group(*cuda_communicator);
  } else {
    make({});
    state_->alone = true;
    state_->on_cpu = &self_communicator();
  }
}

BatchNorm::~BatchNorm() = default;

LayerState& BatchNorm::state() const {
  if (state_ == nullptr) {
    throw InvalidArgument("layer: got one that was moved from, expected another");
  }
  return *state_;
}

namespace {

/// The others learn of a Saved that was moved from, and of a place that is no longer this rank's.
SavedState& content_of(LayerState& layer, const LayerCall& call, SavedState* saved) {
  const auto check = [&](auto& group) {
    before_exchange(group, call, [&] {
      layer.see_place(place_of(group));
      if (saved == nullptr) {
        throw InvalidArgument("saved: got one that was moved from, expected another");
      }
    });
  };
  if (layer.on_cpu != nullptr) {
    check(*layer.on_cpu);
  } else {
    check(*layer.on_cuda);
  }
  return *saved;
}

}  // namespace

void BatchNorm::sized_forward(const Forward& arguments, std::size_t size, Saved& saved,
                              const Execution& execution) {
  LayerState& layer = state();
  layer.see_reset();
  const LayerCall call{layer, layer.calls++, "forward", arguments.x};
  if (saved.state_ != nullptr) {
    saved.state_->filled = false;
  }
  in_call(call, [&] {
    check_size("arguments", size, sizeof(arguments));
    layer.need_group();
    if (layer.alone && !layer.name.empty()) {
      throw InvalidArgument(
          "communicator: got none, expected the group of the layer's ranks, or "
          "self_communicator() for one rank alone");
    }
    SavedState& kept = content_of(layer, call, saved.state_.get());
    if (on_cuda(layer, arguments.x)) {
      need_cuda(layer);
      forward_on_cuda(layer, call, arguments, kept, execution);
    } else {
      forward_on_cpu(layer, call, arguments, kept, execution);
    }
    kept.layer = layer.number;
    kept.call = *call.number;
    kept.keep(arguments);
  });
}

void BatchNorm::sized_backward(const Backward& arguments, std::size_t size, const Saved& saved,
                               const Execution& execution) {
  LayerState& layer = state();
  const LayerCall call{layer, saved.state_ == nullptr ? 0 : saved.state_->call, "backward",
                       arguments.x};
  in_call(call, [&] {
    check_size("arguments", size, sizeof(arguments));
    layer.need_group();
    const SavedState& kept = content_of(layer, call, saved.state_.get());
    if (on_cuda(layer, arguments.x)) {
      need_cuda(layer);
      backward_on_cuda(layer, call, arguments, kept, execution);
    } else {
      backward_on_cpu(layer, call, arguments, kept, execution);
    }
    if (arguments.dx.data == arguments.x.data) {
      kept.overwritten_by = "an earlier backward wrote dx to";
    }
  });
}

void BatchNorm::sized_evaluate(const Evaluate& arguments, std::size_t size,
                               const Execution& execution) {
  LayerState& layer = state();
  in_call({layer, std::nullopt, "evaluation", arguments.x}, [&] {
    check_size("arguments", size, sizeof(arguments));
    syncbn::evaluate(layer, arguments, execution);
  });
}

void BatchNorm::sized_evaluate_backward(const EvaluateBackward& arguments, std::size_t size,
                                        const Execution& execution) {
  LayerState& layer = state();
  in_call({layer, std::nullopt, "backward of an evaluation", arguments.x}, [&] {
    check_size("arguments", size, sizeof(arguments));
    syncbn::evaluate_backward(layer, arguments, execution);
  });
}

void BatchNorm::set_momentum(std::optional<double> momentum) {
  if (momentum.has_value()) {
    check_momentum(*momentum);
  }
  state().options.momentum = momentum;
}

void BatchNorm::abandon_forward(const std::string& reason) {
  TensorView none;
  LayerState& layer = state();
  layer.see_reset();
  in_call({layer, layer.calls++, "forward", none}, [&] {
    layer.need_group();
    if (layer.on_cpu != nullptr) {
      layer.on_cpu->refuse(reason);
    } else {
      layer.on_cuda->refuse(reason);
    }
  });
}

const std::string& BatchNorm::name() const { return state().name; }
const BatchNorm::Options& BatchNorm::options() const { return state().options; }
Communicator* BatchNorm::group() const {
  const LayerState& layer = state();
  return layer.alone ? layer.on_cpu : layer.cpu_link.look();
}

std::uint64_t BatchNorm::calls() const {
  LayerState& layer = state();
  layer.see_reset();
  return layer.calls;
}

void BatchNorm::check(const Execution& execution) {
  TensorView none;
  LayerState& layer = state();
  in_call({layer, layer.calls - 1, "forward", none}, [&] { check_last_call(layer, execution); });
}

}  // namespace syncbn
