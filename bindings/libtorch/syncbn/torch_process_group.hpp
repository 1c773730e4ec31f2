// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "syncbn/error.hpp"
#include "syncbn/framed_exchange.hpp"
#include "syncbn/options.hpp"

/// Groups over a c10d process group of LibTorch. Header-only, for programs that have LibTorch.
namespace syncbn::torch {

/// One rank's end of a group whose ranks are those of a process group with a backend for CPU
/// tensors, for example Gloo.
///
/// After ExchangeTimeout, and after PeerLost for a rank that is gone, the process group is broken,
/// too. If it has a store, these errors name the ranks that did not come. After PeerLost for a rank
/// that abandoned the group the process group is whole: make another ProcessGroupCommunicator of it
/// on every rank.
///
/// When Gloo writes to a rank that is gone, the system sends SIGPIPE to this process, which ends a
/// C++ program. So the constructor makes the process ignore SIGPIPE, as Python does, unless the
/// program handles it or there is only one rank.
class ProcessGroupCommunicator final : public FramedExchange {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// timeout: the time that an exchange waits for the slowest rank, at least 1 ms. Throws
  /// InvalidArgument for another value, for no group, for a group that this process is no member
  /// of, for a group of more than 2048 ranks, and for one without a backend for CPU tensors.
  explicit ProcessGroupCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                    std::chrono::milliseconds timeout = kDefaultTimeout)
      : FramedExchange(checked(group, timeout)->getRank(), checked(group, timeout)->getSize()),
        group_(std::move(group)),
        timeout_(timeout) {
    if (size() > 1) {
      struct sigaction now{};
      if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
        signal(SIGPIPE, SIG_IGN);
      }
    }
  }

  /// Sets the text of this rank's call for the errors of all ranks: "bn1, call 7, forward".
  void set_call(std::string call) { call_ = std::move(call); }

 private:
  static constexpr std::chrono::seconds kAnswerTime{2};

  static const c10::intrusive_ptr<c10d::ProcessGroup>& checked(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::chrono::milliseconds timeout) {
    if (!group) {
      throw InvalidArgument("process_group: got none, expected a group");
    }
    if (timeout < std::chrono::milliseconds(1)) {
      throw InvalidArgument("timeout: got " + std::to_string(timeout.count()) +
                            " ms, expected at least 1 ms");
    }
    const int size = group->getSize();
    const int rank = group->getRank();
    if (size < 1 || size > kMaxRanks) {
      throw InvalidArgument("process_group: got " + std::to_string(size) +
                            " ranks, expected 1 to " + std::to_string(kMaxRanks));
    }
    if (rank < 0 || rank >= size) {  // -1: this process is no member
      throw InvalidArgument("process_group: got rank " + std::to_string(rank) + ", expected 0 to " +
                            std::to_string(size - 1));
    }
    const auto devices = group->getDeviceTypes();
    if (std::none_of(devices.begin(), devices.end(), [](const auto& d) { return d.is_cpu(); })) {
      throw InvalidArgument(
          "process_group: got one without a backend for CPU tensors, expected one with it, for "
          "example Gloo");
    }
    return group;
  }

  void begin_sum(std::span<std::int64_t> words) override {
    try {
      std::vector<at::Tensor> tensors{
          at::from_blob(words.data(), {static_cast<std::int64_t>(words.size())}, at::kLong)};
      c10d::AllreduceOptions options;
      options.timeout = timeout_;
      sums_.push_back(group_->allreduce(tensors, options));
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }

  void wait_for_sum() override {
    try {
      sums_.front()->wait(timeout_);
      sums_.pop_front();
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }

  /// Throws ExchangeTimeout or PeerLost. reason: the backend's text; its first line is used.
  [[noreturn]] void fail(std::string reason) {
    reason.resize(std::min(reason.find('\n'), reason.size()));
    std::string lower = reason;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    const bool late = lower.find("timed out") != std::string::npos;
    const auto [ranks, others] = who_is_here();
    std::string missing;
    for (const int rank : ranks) {
      missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    std::string why;
    if (late) {
      why = missing + " did not come to the exchange within ";
      if (missing.empty()) {
        why = "not all ranks came within ";
      }
      why += std::to_string(timeout_.count()) + " ms";
      throw ExchangeTimeout(who() + why + others, ranks);
    }
    why = missing.empty() ? "a rank" : missing;
    why += " has ended, or closed its connections";
    throw PeerLost(who() + why + others + "; the process group: " + reason, ranks);
  }

  /// Returns the ranks that do not answer through the store, and the calls of the others. When one
  /// rank fails, all waiting ranks fail at about the same time, because connections are closed.
  std::pair<std::vector<int>, std::string> who_is_here() {
    std::vector<int> missing;
    std::string others;
    try {
      const auto store = group_->getStore();
      if (!store) {
        return {};
      }
      const std::string prefix = "syncbn/" + group_->getGroupName() + "/failed/";
      store->set(prefix + std::to_string(rank()), call_.empty() ? "in an exchange" : call_);
      const auto until = std::chrono::steady_clock::now() + kAnswerTime;
      for (int r = 0; r < size(); ++r) {
        const std::string key = prefix + std::to_string(r);
        while (!store->check({key}) && std::chrono::steady_clock::now() < until) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        if (!store->check({key})) {
          missing.push_back(r);
        } else if (r != rank()) {
          others += "; rank " + std::to_string(r) + ": " + store->get_to_str(key);
        }
      }
    } catch (const std::exception&) {  // the lost process may be the store's own
      return {};
    }
    return {missing, others};
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds timeout_;
  std::string call_;
  std::deque<c10::intrusive_ptr<c10d::Work>> sums_;  ///< that were begun
};

}  // namespace syncbn::torch
