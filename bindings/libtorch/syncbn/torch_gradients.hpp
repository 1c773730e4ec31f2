// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "syncbn/error.hpp"
#include "syncbn/torch_process_group.hpp"

/// Means of gradients over the ranks of a process group. Header-only, for programs that have
/// LibTorch.
namespace syncbn::torch {

namespace detail {

/// Compares the parameters of average_gradients on all ranks: their number, dtypes and shapes.
/// Without that, sums of equal length would mix gradients, and Gloo ends the process if lengths
/// differ.
class SameParameters {
 public:
  SameParameters(const std::vector<at::Tensor>& learning,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 std::chrono::milliseconds timeout)
      : learning_(learning), ranks_(group, timeout) {}

  /// Throws DivergenceError on all ranks if they differ.
  void check() {
    const std::string call =
        "average_gradients, " + std::to_string(learning_.size()) + " parameters";
    ranks_.set_call(call);
    try {
      compare();
    } catch (Error& error) {
      error.set_layer({}, call);
      throw;
    }
  }

 private:
  using Words = std::vector<std::int64_t>;
  static constexpr std::size_t kTextWords = 32;  // of a parameter's dtype and shape

  void compare() {
    std::uint64_t all = 0;
    Words each;
    for (const at::Tensor& parameter : learning_) {
      std::uint64_t one = mix(0, static_cast<std::int64_t>(parameter.scalar_type()));
      for (const std::int64_t extent : parameter.sizes()) {
        one = mix(one, extent);
      }
      each.push_back(static_cast<std::int64_t>(one));
      all = mix(all, each.back());
    }
    const auto count = static_cast<std::int64_t>(learning_.size());
    const std::vector<Words> told = first_gather({count, static_cast<std::int64_t>(all)});
    std::vector<int> others;  // the ranks that differ from rank 0
    std::int64_t most = 0;
    for (std::size_t r = 0; r < told.size(); ++r) {
      most = std::max(most, told[r][0]);
      if (told[r] != told[0]) {
        others.push_back(static_cast<int>(r));
      }
    }
    if (!others.empty()) {
      each.resize(static_cast<std::size_t>(most));
      raise(told, each, others);
    }
  }

  /// As gather. If another rank is in a layer, that one exchanges once more to name the calls, and
  /// so does this rank, of another length again.
  std::vector<Words> first_gather(const Words& own) {
    try {
      return gather(own);
    } catch (const DivergenceError& error) {
      try {
        gather({0});
      } catch (const Error&) {  // as it must be
      }
      throw error;
    }
  }

  /// each: a number for each of this rank's parameters, and 0 for those that only others have.
  [[noreturn]] void raise(const std::vector<Words>& told, const Words& each,
                          const std::vector<int>& others) {
    const auto other = static_cast<std::size_t>(others.front());
    const auto line = [&](const std::string& what, const auto& first, const auto& second) {
      return "; " + what + ": " + first + " on rank 0, " + second + " on rank " +
             std::to_string(other);
    };
    const std::vector<Words> numbers = gather(each);
    const auto place =
        std::mismatch(numbers[0].begin(), numbers[0].end(), numbers[other].begin()).first -
        numbers[0].begin();
    const std::vector<Words> texts = gather(text_of(static_cast<std::size_t>(place)));
    const auto text = [&](std::size_t r) {
      return std::string(reinterpret_cast<const char*>(texts[r].data()));
    };
    std::string differ =
        line("parameter " + std::to_string(place) + " in order", text(0), text(other));
    if (told[0][0] != told[other][0]) {
      differ = line("parameters that require a gradient", std::to_string(told[0][0]),
                    std::to_string(told[other][0])) +
               differ;
    }
    throw DivergenceError("rank " + std::to_string(ranks_.rank()) + " of " +
                              std::to_string(ranks_.size()) +
                              ": the ranks did not pass the same parameters: " + differ.substr(2),
                          others);
  }

  /// "float32 (8, 3)" or "none".
  [[nodiscard]] Words text_of(std::size_t place) const {
    std::string text = "none";
    if (place < learning_.size()) {
      const at::Tensor& parameter = learning_[place];
      text = std::string(c10::getDtypeNames(parameter.scalar_type()).first) + " (";
      for (std::int64_t axis = 0; axis < parameter.dim(); ++axis) {
        text += (axis > 0 ? ", " : "") + std::to_string(parameter.size(axis));
      }
      text += ")";
    }
    Words words(kTextWords);
    std::memcpy(words.data(), text.data(),
                std::min(text.size(), sizeof(words[0]) * kTextWords - 1));
    return words;
  }

  /// Returns the words of each rank. All ranks bring equally many.
  std::vector<Words> gather(const Words& own) {
    const auto size = static_cast<std::size_t>(ranks_.size());
    const auto rank = static_cast<std::size_t>(ranks_.rank());
    Words all(size * own.size());
    std::copy(own.begin(), own.end(), all.data() + rank * own.size());
    ranks_.all_reduce_sum(all);
    std::vector<Words> of;
    for (std::size_t r = 0; r < size; ++r) {
      of.emplace_back(all.data() + r * own.size(), all.data() + (r + 1) * own.size());
    }
    return of;
  }

  static std::uint64_t mix(std::uint64_t hash, std::int64_t word) {
    return (std::rotl(hash, 27) ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15U + 1;
  }

  const std::vector<at::Tensor>& learning_;
  ProcessGroupCommunicator ranks_;
};

}  // namespace detail

/// Replaces the gradients of these parameters by their means over the ranks of a process group.
/// Every rank passes the same parameters in the same order, and gets the same bits; those that
/// require no gradient are left out. A gradient that is undefined on some ranks counts as zero
/// there; one that is undefined on all ranks stays so. The ranks first compare number, dtypes and
/// shapes in a small exchange. Then there is one all-reduce for each dtype.
///
/// timeout: the time that each of these waits for the slowest rank. Throws InvalidArgument for no
/// group, DivergenceError on all ranks if parameters differ, ExchangeTimeout or PeerLost if a rank
/// does not come to the exchange, and later what the process group throws.
inline void average_gradients(
    const std::vector<at::Tensor>& parameters,
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    std::chrono::milliseconds timeout = ProcessGroupCommunicator::kDefaultTimeout) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> learning;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad()) {
      learning.push_back(parameter);
      by_dtype[parameter.scalar_type()].push_back(parameter);
    }
  }
  detail::SameParameters(learning, process_group, timeout).check();
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  for (const auto& [dtype, of_dtype] : by_dtype) {
    std::vector<at::Tensor> own;  // behind each gradient a number: whether there is one
    std::vector<std::int64_t> sizes;
    for (const at::Tensor& parameter : of_dtype) {
      const at::Tensor& gradient = parameter.grad();
      own.push_back((gradient.defined() ? gradient : at::zeros_like(parameter)).reshape(-1));
      own.push_back(at::full({1}, gradient.defined() ? 1 : 0, parameter.options()));
      sizes.insert(sizes.end(), {parameter.numel(), 1});
    }
    std::vector<at::Tensor> sums{at::cat(own)};
    process_group->allreduce(sums, options)->wait(timeout);
    const auto means = sums[0].div_(process_group->getSize()).split_with_sizes(sizes);
    for (std::size_t i = 0; i < of_dtype.size(); ++i) {
      const at::Tensor mean = means[2 * i].view(of_dtype[i].sizes());
      if (of_dtype[i].grad().defined()) {
        of_dtype[i].grad().copy_(mean);
      } else if (means[2 * i + 1].item<double>() > 0) {
        of_dtype[i].mutable_grad() = mean.clone();
      }
    }
  }
}

}  // namespace syncbn::torch
