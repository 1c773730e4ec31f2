// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "layer/agreement.hpp"
#include "layer/layer.hpp"
#include "syncbn/step.hpp"
#include "tensors/scratch.hpp"

// A layer's exchanges on the CPU, which say how the ranks' calls differ.
namespace syncbn {

/// The one exchange of a direction.
class LayerSum final : public SumInParts {
 public:
  LayerSum(const TensorView& x, Communicator& communicator, int ranks)
      : communicator_(communicator),
        parts_(communicator.parts()),
        words_(2 * static_cast<std::size_t>(message_words(x.dtype, x.sizes[1]))),
        message_(words_.data(), words_.size() / 2),
        merged_(words_.data() + message_.size(), message_.size()) {
    group_.sum = this;
    group_.in_parts = parts_ != nullptr;
    group_.ranks = ranks;
    group_.message = message_;
    group_.merged = merged_;
  }

  LayerSum(const LayerSum&) = delete;
  LayerSum& operator=(const LayerSum&) = delete;

  /// run(GroupSum): the direction. Gives back the count of elements.
  template <class Run>
  std::int64_t run(const LayerCall& layer_call, const AgreedCall& call, const Run& run) {
    Reached reached{};
    try {
      before_exchange(*this, layer_call, [&] { reached = run(group_); });
    } catch (const DivergenceError& error) {
      explain_divergence(error, call, communicator_);
    }
    if (reached != Reached::kOutput) {
      check_agreement(group_.info, call, communicator_);
    }
    return group_.info.count;
  }

  /// After an error that the others do not see.
  void refuse(const std::string& reason) {
    if (!over_) {
      communicator_.refuse(reason);
    }
  }

  void open(std::span<const std::int64_t>, std::span<std::int64_t>) override {
    watched([&] {
      if (parts_ != nullptr) {
        parts_->open(message_, merged_);
      }
    });
  }
  void publish(std::size_t words) override {
    watched([&] {
      if (parts_ != nullptr) {
        parts_->publish(words);
      }
    });
  }
  /// To the end.
  bool wait(std::size_t words, std::chrono::milliseconds slice) override {
    watched([&] {
      if (parts_ != nullptr) {
        while (!parts_->wait(words, slice)) {
        }
      } else if (!over_) {
        std::copy(message_.begin(), message_.end(), merged_.begin());
        communicator_.all_reduce_sum(merged_);
      }
    });
    over_ = over_ || words == message_.size();
    return true;
  }

 private:
  template <class Body>
  void watched(const Body& body) {
    try {
      body();
    } catch (...) {
      over_ = true;  // the others know
      throw;
    }
  }
  Communicator& communicator_;
  SumInParts* parts_;
  cpu::ScratchArray<std::int64_t> words_;
  std::span<std::int64_t> message_;
  std::span<std::int64_t> merged_;
  GroupSum group_;
  bool over_ = false;
};

/// The records of all ranks, behind the sum of their headers.
class SummedRecords {
 public:
  SummedRecords(const ForwardStep& step, const Execution& execution)
      : words_(static_cast<std::size_t>(
            forward_words(step.statistics, step.pass.x.dtype, step.pass.x.sizes[1], step.ranks))) {
    forward_begin(step, words_.data(), execution);
  }
  Merged sum(const AgreedCall& call, Communicator& communicator) {
    const int ranks = call.place.ranks;
    if (ranks > 1) {
      try {
        communicator.all_reduce_sum({words_.data(), words_.size()});
      } catch (const DivergenceError& error) {
        explain_divergence(error, call, communicator);
      }
    }
    check_agreement(read_header(words_.data(), ranks), call, communicator);
    return {words_.data(), words_.data() + kHeaderWords, call.dtype, ranks};
  }

 private:
  cpu::ScratchArray<std::int64_t> words_;
};

}  // namespace syncbn
