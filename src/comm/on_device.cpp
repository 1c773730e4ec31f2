// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <vector>

#include "comm/group_link.hpp"
#include "comm/rank_texts.hpp"
#include "step/device.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/error.hpp"

// Groups for messages on a device that need nothing but its memory: of one rank, and through the
// host.
namespace syncbn::cuda {
namespace {

void check_sizes(std::span<const std::int64_t> in, std::span<std::int64_t> out) {
  if (out.size() != in.size()) {
    throw InvalidArgument(size_text(out.size_bytes(), in.size_bytes()));
  }
}

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override {
    check_sizes(in, out);
    if (in.data() != out.data() && !in.empty()) {
      cuda_passes().copy(stream.handle, out.data(), in.data(), in.size_bytes());
    }
  }
  void abandon(const std::string&) override {}
};

class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(syncbn::Communicator& host) : host_(host) {}
  int rank() const override { return host_.get().rank(); }
  int size() const override { return host_.get().size(); }

  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override {
    before_exchange([&] {
      check_sizes(in, out);
      words_.resize(in.size());
      cuda_passes().fetch(stream.handle, words_.data(), in.data(), in.size_bytes());
    });
    host_.get().all_reduce_sum(words_);
    cuda_passes().bring(stream.handle, out.data(), words_.data(), out.size_bytes());
  }

  void abandon(const std::string& reason) override {
    if (auto* const host = host_.look()) {
      host->abandon(reason);
    }
  }
  void refuse(const std::string& reason) override {
    if (auto* const host = host_.look()) {
      host->refuse(reason);
    }
  }

 private:
  /// The other ranks would wait for one that fails here.
  template <class Body>
  void before_exchange(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      refuse(error.what());
      throw;
    }
  }
  syncbn::detail::GroupLink<syncbn::Communicator> host_;
  std::vector<std::int64_t> words_;
};

}  // namespace

Communicator& self_communicator() {
  cuda_passes();
  static auto* const kSelf = new SelfCommunicator;  // also for layers that end after main
  return *kSelf;
}

std::unique_ptr<Communicator> staged_communicator(syncbn::Communicator& host) {
  cuda_passes();
  return std::make_unique<StagedCommunicator>(host);
}

std::int64_t read_count(const std::int64_t* info, const Stream& stream) {
  std::array<std::int64_t, kInfoWords> words{};
  cuda_passes().fetch(stream.handle, words.data(), info, sizeof(words));
  if (words[0] < 0) {
    throw DivergenceError(
        "the ranks of the group did not make the same call (layer, call number, channels, eps, "
        "dtype and options must be equal on all of them), or have more than 2^36 elements per "
        "channel");
  }
  return words[0];
}

}  // namespace syncbn::cuda
