#include <cuda_runtime_api.h>

#include <array>
#include <vector>

#include "comm/rank_texts.hpp"
#include "cuda/check.hpp"
#include "syncbn/cuda_communicator.hpp"
#include "syncbn/error.hpp"

// Groups that need nothing but CUDA: of one rank, and through the host.
namespace syncbn::cuda {
namespace {

cudaStream_t handle(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

void check_sizes(std::size_t in, std::size_t out, std::size_t ranks) {
  if (out != in * ranks) {
    throw InvalidArgument(gather_size_text(out, in * ranks));
  }
}

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override {
    all_gather(std::as_bytes(in), std::as_writable_bytes(out), stream);
  }
  void all_gather(std::span<const std::byte> in, std::span<std::byte> out,
                  const Stream& stream) override {
    check_sizes(in.size(), out.size(), 1);
    if (in.data() != out.data() && !in.empty()) {
      SYNCBN_CUDA_CHECK(cudaMemcpyAsync(out.data(), in.data(), in.size(), cudaMemcpyDeviceToDevice,
                                        handle(stream)));
    }
  }
  void abandon(const std::string&) override {}
};

class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(syncbn::Communicator& host) : host_(host) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }

  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const Stream& stream) override {
    before_exchange([&] {
      check_sizes(in.size_bytes(), out.size_bytes(), 1);
      words_.resize(in.size());
      fetch(words_.data(), in.data(), in.size_bytes(), stream);
    });
    host_.all_reduce_sum(words_);
    bring(out.data(), words_.data(), out.size_bytes(), stream);
  }

  void all_gather(std::span<const std::byte> in, std::span<std::byte> out,
                  const Stream& stream) override {
    before_exchange([&] {
      check_sizes(in.size(), out.size(), static_cast<std::size_t>(size()));
      mine_.resize(in.size());
      all_.resize(out.size());
      fetch(mine_.data(), in.data(), in.size(), stream);
    });
    host_.all_gather(mine_, all_);
    bring(out.data(), all_.data(), out.size(), stream);
  }

  void abandon(const std::string& reason) override { host_.abandon(reason); }

 private:
  /// The other ranks would wait for one that fails here.
  template <class Body>
  void before_exchange(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      abandon(error.what());
      throw;
    }
  }
  static void fetch(void* to, const void* from, std::size_t bytes, const Stream& stream) {
    SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, handle(stream)));
    SYNCBN_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
  }
  /// Waits: `from` is pageable memory, which devices that read it directly may read late.
  static void bring(void* to, const void* from, std::size_t bytes, const Stream& stream) {
    SYNCBN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, handle(stream)));
    SYNCBN_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
  }

  syncbn::Communicator& host_;
  std::vector<std::int64_t> words_;
  std::vector<std::byte> mine_;
  std::vector<std::byte> all_;
};

}  // namespace

std::unique_ptr<Communicator> self_communicator() { return std::make_unique<SelfCommunicator>(); }

std::unique_ptr<Communicator> staged_communicator(syncbn::Communicator& host) {
  return std::make_unique<StagedCommunicator>(host);
}

std::int64_t read_count(const std::int64_t* info, const Stream& stream) {
  std::array<std::int64_t, kInfoWords> words{};
  SYNCBN_CUDA_CHECK(
      cudaMemcpyAsync(words.data(), info, sizeof(words), cudaMemcpyDeviceToHost, handle(stream)));
  SYNCBN_CUDA_CHECK(cudaStreamSynchronize(handle(stream)));
  if (words[0] < 0) {
    throw DivergenceError(
        "the ranks of the group did not make the same call (layer, call number, channels, eps, "
        "dtype and options must be equal on all of them), or have more than 2^36 elements per "
        "channel");
  }
  return words[0];
}

}  // namespace syncbn::cuda
