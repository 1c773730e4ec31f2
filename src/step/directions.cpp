// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "statistics/header.hpp"
#include "step/pass_arguments.hpp"
#include "step/passes.hpp"

// Whole directions, of one rank and of a rank of a group: header and order; the arithmetic is
// elsewhere.
namespace syncbn {
namespace {

/// What a message of these samples alone would say.
MessageInfo info_of(const SampleView& samples) {
  MessageInfo info;
  info.count = samples.count();
  info.agree = true;
  info.any_data = info.count > 0;
  info.dtype = info.any_data ? samples.dtype : info.dtype;
  return info;
}

/// The words of one direction on their way. make(begin, end): statistics of these channels. count:
/// what all ranks have to bring, or -1.
template <class Make>
class Sums final : public cpu::GroupSums {
 public:
  Sums(const SampleView& samples, GroupSum& group, const Make& make, std::uint32_t fingerprint,
       std::int64_t backward, std::int64_t count = -1)
      : group_(group),
        make_(make),
        count_(count),
        channels_(samples.channels),
        per_channel_(words_per_channel(samples.dtype)) {
    const std::int64_t own = samples.count();
    write_header(group.message.data(), own, fingerprint, own == 0 ? 0 : dtype_flag(samples.dtype),
                 backward);
    group.sum->open(group.message, group.merged);
  }
  bool streams() const override { return group_.in_parts; }
  void publish(std::int64_t end) override { group_.sum->publish(words(end)); }
  bool wait(std::int64_t end) override {
    if (refused_ || !group_.sum->wait(words(end), group_.slice)) {
      return false;
    }
    if (!seen_) {
      seen_ = true;
      group_.info = header_info(group_.merged.data(), group_.ranks);
      refused_ = !usable(group_.info) || (count_ >= 0 && group_.info.count != count_) ||
                 (group_.accept && !group_.accept(group_.info));
    }
    return !refused_;
  }
  void finalize(std::int64_t begin, std::int64_t end) override { make_(begin, end); }

  /// Where the direction has come to when not to its end.
  Reached reached() {
    return refused_ && group_.sum->wait(words(channels_), group_.slice) ? Reached::kExchange
                                                                        : Reached::kPublished;
  }

 private:
  std::size_t words(std::int64_t end) const {
    return static_cast<std::size_t>(kHeaderWords + end * per_channel_);
  }

  GroupSum& group_;
  const Make& make_;
  std::int64_t count_;
  std::int64_t channels_;
  std::int64_t per_channel_;
  bool seen_ = false;  ///< the merged header
  bool refused_ = false;
};

/// A rank without elements, which has nothing to write either. Whether statistics are there.
template <class Make>
bool without_elements(Sums<Make>& sums, GroupSum& group, std::int64_t channels) {
  std::fill(group.message.begin() + kHeaderWords, group.message.end(), 0);
  sums.publish(channels);
  if (!sums.wait(channels)) {
    return false;
  }
  sums.finalize(0, channels);
  return true;
}

}  // namespace

MessageInfo forward_of_one_rank(const ForwardPass& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(p.x, p.mask);
  const std::int64_t channels = samples.channels;
  const MessageInfo info = info_of(samples);
  if (info.count == 0) {  // what y becomes then, the pass alone knows
    fill_moments(true, p.mean, p.var, p.rstd, channels);
    normalize({p.x, p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y, p.activation_mask,
               p.activation},
              execution);
  } else if (channels > 0) {
    const AffineValues affine(p.weight, p.bias, channels);
    const std::optional<SampleView> added = optional_view(p.residual);
    cpu::forward_of_one_rank(samples, added ? &*added : nullptr, SampleView(p.y), p.activation_mask,
                             affine.scale(), affine.shift(), p.activation,
                             {info.count, p.eps, p.mean, p.var, p.rstd}, executor);
  }
  return info;
}

MessageInfo backward_of_one_rank(const BackwardPass& p, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(p.x, p.mask);
  const std::int64_t channels = samples.channels;
  const MessageInfo info = info_of(samples);
  check_count(info.count, p.count);
  const cpu::ScratchArray<double> coefficients(static_cast<std::size_t>(3 * channels));
  const cpu::Gradients to{p.count == 0 ? 1 : p.count, p.mean,    p.rstd,  p.weight,
                          coefficients.data(),        p.dweight, p.dbias, channels};
  if (!samples.empty() && channels > 0) {  // u and dx are written, whatever counts
    const PullbackArguments pullback(p.through, p.mean, p.rstd, channels);
    const std::optional<SampleView> kept = optional_view(p.u);
    cpu::backward_of_one_rank(SampleView(p.dy), samples, kept ? &*kept : nullptr, SampleView(p.dx),
                              pullback.view(), to, executor);
  }
  if (p.count == 0) {
    fill_gradients(true, to, 0, channels);
  }
  return info;
}

Reached forward_in_group(const ForwardPass& p, GroupSum& group, std::uint32_t fingerprint,
                         std::int64_t backward, const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(p.x, p.mask);
  const std::int64_t channels = samples.channels;
  const AffineValues affine(p.weight, p.bias, channels);
  const std::optional<SampleView> added = optional_view(p.residual);
  const auto make = [&](std::int64_t begin, std::int64_t end) {
    const cpu::Moments to{group.info.count, p.eps, p.mean, p.var, p.rstd};
    if (to.count == 0) {
      fill_moments(true, p.mean + begin, p.var + begin, p.rstd + begin, end - begin);
    } else {
      cpu::finalize(group.info.dtype, group.merged.data() + kHeaderWords, begin, end, to);
    }
  };
  Sums sums(samples, group, make, fingerprint, backward);
  const bool done =
      samples.empty() || channels == 0
          ? without_elements(sums, group, channels)
          : cpu::forward_in_group(samples, added ? &*added : nullptr, SampleView(p.y),
                                  p.activation_mask, affine.scale(), affine.shift(), p.activation,
                                  {0, p.eps, p.mean, p.var, p.rstd},
                                  group.message.data() + kHeaderWords, sums, executor);
  return done ? Reached::kOutput : sums.reached();
}

Reached backward_in_group(const BackwardPass& p, GroupSum& group, std::uint32_t fingerprint,
                          const Execution& execution) {
  cpu::ContractExecutor executor(*execution.executor);
  const SampleView samples(p.x, p.mask);
  const std::int64_t channels = samples.channels;
  const PullbackArguments pullback(p.through, p.mean, p.rstd, channels);
  const std::optional<SampleView> kept = optional_view(p.u);
  const cpu::ScratchArray<double> coefficients(static_cast<std::size_t>(3 * channels));
  const MutableTensorView none;
  const cpu::Gradients global{p.count == 0 ? 1 : p.count,
                              p.mean,
                              p.rstd,
                              p.weight,
                              coefficients.data(),
                              p.share ? none : p.dweight,
                              p.share ? none : p.dbias,
                              channels};
  const cpu::Gradients own{1, p.mean, p.rstd, {}, nullptr, p.dweight, p.dbias, channels};
  const auto make = [&](std::int64_t begin, std::int64_t end) {
    if (p.count == 0) {
      fill_gradients(true, global, begin, end);
    } else {
      cpu::finalize(group.info.dtype, group.merged.data() + kHeaderWords, begin, end, global);
    }
    if (p.share) {
      cpu::finalize(p.x.dtype, group.message.data() + kHeaderWords, begin, end, own);
    }
  };
  Sums sums(samples, group, make, fingerprint, 0, p.count);
  const bool done =
      samples.empty() || channels == 0
          ? without_elements(sums, group, channels)
          : cpu::backward_in_group(SampleView(p.dy), samples, kept ? &*kept : nullptr,
                                   SampleView(p.dx), pullback.view(), global,
                                   group.message.data() + kHeaderWords, sums, executor);
  return done ? Reached::kOutput : sums.reached();
}

}  // namespace syncbn
