// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "syncbn/communicator.hpp"
#include "syncbn/error.hpp"
#include "syncbn/message.hpp"

/// Groups over a c10d process group of LibTorch. Header-only, for programs that have LibTorch.
namespace syncbn::torch {

/// One rank's end of a group whose ranks are those of a process group with a backend for CPU
/// tensors, for example Gloo.
///
/// Gloo ends the process if ranks bring different lengths. So the first all-reduce of an exchange
/// has the same length in all calls, and says how many words the rank brings. Words that do not fit
/// follow in a second all-reduce. If lengths differ, every rank gets DivergenceError. If a rank
/// abandons, the others get PeerLost in that exchange alone. In both cases the group goes on. After
/// ExchangeTimeout, and after PeerLost for a rank that is gone, this group and the process group
/// are broken for good, and later calls throw PeerLost. If the process group has a store, these
/// errors name the ranks that did not come.
///
/// When Gloo writes to a rank that is gone, the system sends SIGPIPE to this process, which ends a
/// C++ program. So the constructor makes the process ignore SIGPIPE, as Python does, unless the
/// program handles it or there is only one rank.
class ProcessGroupCommunicator final : public Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  /// The words that fit the first all-reduce: a message of 512 channels of float32.
  static constexpr std::int64_t kFrameWords = kHeaderWords + 512 * 19;

  /// timeout: the time that an exchange waits for the slowest rank, at least 1 ms. Throws
  /// InvalidArgument for another value, for no group, for a group that this process is no member
  /// of, for a group of more than 2048 ranks, and for one without a backend for CPU tensors.
  explicit ProcessGroupCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                    std::chrono::milliseconds timeout = kDefaultTimeout)
      : group_(std::move(group)), timeout_(timeout) {
    if (!group_) {
      throw InvalidArgument("process_group: got none, expected a group");
    }
    if (timeout_ < std::chrono::milliseconds(1)) {
      throw InvalidArgument("timeout: got " + std::to_string(timeout_.count()) +
                            " ms, expected at least 1 ms");
    }
    if (size() < 1 || size() > kMaxRanks) {
      throw InvalidArgument("process_group: got " + std::to_string(size()) +
                            " ranks, expected 1 to " + std::to_string(kMaxRanks));
    }
    if (rank() < 0 || rank() >= size()) {  // -1: this process is no member
      throw InvalidArgument("process_group: got rank " + std::to_string(rank()) +
                            ", expected 0 to " + std::to_string(size() - 1));
    }
    const auto devices = group_->getDeviceTypes();
    if (std::none_of(devices.begin(), devices.end(), [](const auto& d) { return d.is_cpu(); })) {
      throw InvalidArgument(
          "process_group: got one without a backend for CPU tensors, expected one with it, for "
          "example Gloo");
    }
    if (size() > 1) {
      struct sigaction now{};
      if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
        signal(SIGPIPE, SIG_IGN);
      }
    }
  }

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }

  /// Sets the text of this rank's call for the errors of all ranks: "bn1, call 7, forward".
  void set_call(std::string call) { call_ = std::move(call); }

  void all_reduce_sum(std::span<std::int64_t> words) override { exchange(Kind::kSum, words); }

  void all_gather(std::span<const std::byte> in, std::span<std::byte> out) override {
    const std::size_t expected = in.size() * static_cast<std::size_t>(size());
    if (out.size() != expected) {
      throw InvalidArgument("out: got " + std::to_string(out.size()) + " bytes, expected " +
                            std::to_string(expected));
    }
    const std::size_t each = (in.size() + kBytes - 1) / kBytes;
    std::vector<std::int64_t> places(each * static_cast<std::size_t>(size()));
    if (!in.empty()) {
      std::memcpy(places.data() + each * static_cast<std::size_t>(rank()), in.data(), in.size());
    }
    exchange(Kind::kGather, places);
    for (std::size_t r = 0; r < static_cast<std::size_t>(size()) && !in.empty(); ++r) {
      std::memcpy(out.data() + r * in.size(), places.data() + r * each, in.size());
    }
  }

  /// abandon and refuse take part in the others' exchange, and say there that this rank cannot make
  /// it. So both wait for the other ranks.
  void abandon(const std::string& reason) override { say("left the group: " + reason); }
  void refuse(const std::string& reason) override { say("refused its call: " + reason); }

 private:
  enum class Kind : std::uint8_t { kSum, kGather };

  // The frame begins with numbers that must be equal on all ranks, each with its square. Then comes
  // the number of ranks that cannot take part.
  static constexpr int kTags = 2;
  static constexpr int kLeavers = 2 * kTags;
  static constexpr int kPrefixWords = kLeavers + 1;
  static constexpr int kTagBits = 20;  // sums of squares times 2048 ranks fit a word
  static constexpr std::size_t kBytes = sizeof(std::int64_t);
  static constexpr std::chrono::seconds kAnswerTime{2};

  static at::Tensor new_frame() { return at::zeros({kPrefixWords + kFrameWords}, at::kLong); }
  static std::int64_t* words_of(const at::Tensor& t) { return t.mutable_data_ptr<std::int64_t>(); }

  std::string who() const {
    return "rank " + std::to_string(rank()) + " of " + std::to_string(size()) + ": ";
  }

  void say(const std::string& why) {
    if (!broken_.empty()) {
      return;
    }
    try {
      at::Tensor frame = new_frame();
      words_of(frame)[kLeavers] = 1;
      reduce(frame);
      texts(why);
    } catch (const Error&) {  // the caller has an error of its own to throw
    }
  }

  [[noreturn]] void diverge(const std::string& own) {
    std::string text;
    std::vector<int> odd;
    const auto said = texts(own);
    for (std::size_t r = 0; r < said.size(); ++r) {
      text += "; rank " + std::to_string(r) + ": " + said[r];
      if (said[r] != said[0]) {
        odd.push_back(static_cast<int>(r));
      }
    }
    if (text.empty()) {
      text = "; the others did not say";
    }
    throw DivergenceError(who() + "the ranks did not make the same call" + text, odd);
  }

  void exchange(Kind kind, std::span<std::int64_t> words) {
    const auto length = static_cast<std::int64_t>(words.size());
    const std::int64_t framed = std::min(length, kFrameWords);
    const std::array<std::int64_t, kTags> tags = {
        length & ((1 << kTagBits) - 1), (length >> kTagBits) * 2 + static_cast<std::int64_t>(kind)};
    at::Tensor frame = new_frame();
    std::int64_t* data = words_of(frame);
    for (std::size_t i = 0; i < kTags; ++i) {
      data[2 * i] = tags[i];
      data[2 * i + 1] = tags[i] * tags[i];
    }
    std::copy_n(words.data(), framed, data + kPrefixWords);
    reduce(frame);
    if (data[kLeavers] != 0) {
      throw_left();
    }
    for (int i = 0; i < kTags; ++i) {  // sum of squares = square of the sum / ranks: all equal
      if (size() * data[2 * i + 1] != data[2 * i] * data[2 * i]) {
        diverge(!call_.empty() ? call_
                               : (kind == Kind::kSum ? "a sum of " : "a gathering of ") +
                                     std::to_string(length) + " words");
      }
    }
    std::copy_n(data + kPrefixWords, framed, words.data());
    if (length > framed) {
      at::Tensor rest = at::empty({length - framed}, at::kLong);
      std::copy(words.begin() + framed, words.end(), words_of(rest));
      reduce(rest);
      std::copy_n(words_of(rest), length - framed, words.begin() + framed);
    }
  }

  /// Returns the texts of all ranks, each cut to fit the frame. Empty if the exchange fails.
  std::vector<std::string> texts(const std::string& own) {
    const std::int64_t each = kFrameWords / size();
    const std::size_t room = static_cast<std::size_t>(each) * kBytes;
    at::Tensor frame = new_frame();
    std::memcpy(words_of(frame) + kPrefixWords + each * rank(), own.data(),
                std::min(own.size(), room));
    try {
      reduce(frame);
    } catch (const Error&) {
      return {};
    }
    std::vector<std::string> said;
    for (int r = 0; r < size(); ++r) {
      const auto* text = reinterpret_cast<const char*>(words_of(frame) + kPrefixWords + each * r);
      said.emplace_back(text, strnlen(text, room));
    }
    return said;
  }

  /// Throws PeerLost with the texts of the ranks that cannot take part; other ranks send none.
  [[noreturn]] void throw_left() {
    std::string text;
    std::vector<int> ranks;
    const auto said = texts("");
    for (std::size_t r = 0; r < said.size(); ++r) {
      if (!said[r].empty()) {
        text += (text.empty() ? "rank " : "; rank ") + std::to_string(r) + " " + said[r];
        ranks.push_back(static_cast<int>(r));
      }
    }
    if (text.empty()) {
      text = "a rank left the group and did not say why";
    }
    throw PeerLost(who() + text, ranks);
  }

  /// Sums over the ranks, in place. The backend keeps the tensor alive as long as necessary.
  void reduce(const at::Tensor& words) {
    if (!broken_.empty()) {
      throw PeerLost(who() + "the group is broken: " + broken_);
    }
    try {
      std::vector<at::Tensor> tensors{words};
      c10d::AllreduceOptions options;
      options.timeout = timeout_;
      group_->allreduce(tensors, options)->wait(timeout_);
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
    const std::string limit = std::to_string(timeout_.count());
    std::string why;
    if (late && missing.empty()) {
      why = "not all ranks came within " + limit + " ms";
    } else if (late) {
      why = missing + " did not come to the exchange within " + limit + " ms";
    } else if (missing.empty()) {
      why = "a rank has ended, or closed its connections";
    } else {
      why = missing + " has ended, or closed its connections";
    }
    broken_ = why + others;
    if (late) {
      throw ExchangeTimeout(who() + broken_, ranks);
    }
    throw PeerLost(who() + broken_ + "; the process group: " + reason, ranks);
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
  std::string broken_;  ///< the reason why the group is broken, or empty
};

}  // namespace syncbn::torch
