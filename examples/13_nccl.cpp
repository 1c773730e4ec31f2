// SPDX-License-Identifier: Apache-2.0
// One rank per GPU over NCCL, as threads of one process: the bits are those of one GPU. A rank may
// as well be a process; then the unique id travels over what the launcher brings (MPI, a store).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <syncbn/batch_norm.hpp>
#include <syncbn/nccl.hpp>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t kChannels = 4;

#define CHECK(call)                                                         \
  if (const cudaError_t error = (call); error != cudaSuccess) {             \
    std::fprintf(stderr, #call " failed: %s\n", cudaGetErrorString(error)); \
    std::exit(1);                                                           \
  }                                                                         \
  static_assert(true)

/// Device memory, zero at first.
template <class T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)));
  CHECK(cudaMemset(memory, 0, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

/// y for rows first to last - 1 of x. Device memory is left to the end of the process.
std::vector<float> normalize(const std::vector<float>& x, std::int64_t first, std::int64_t last,
                             const syncbn::cuda::NcclUniqueId& id, int rank, int ranks) {
  using syncbn::DType;
  CHECK(cudaSetDevice(rank));
  syncbn::cuda::NcclCommunicator communicator(id, rank, ranks);
  cudaStream_t handle = nullptr;
  CHECK(cudaStreamCreate(&handle));

  const std::int64_t count = (last - first) * kChannels;
  std::vector<float> part(static_cast<std::size_t>(count));
  const std::size_t bytes = part.size() * sizeof(float);
  float* in = allocate<float>(count);
  float* out = allocate<float>(count);
  CHECK(cudaMemcpy(in, x.data() + first * kChannels, bytes, cudaMemcpyHostToDevice));
  const std::vector<std::int64_t> shape = {last - first, kChannels};
  const std::vector<std::int64_t> strides = {kChannels, 1};
  CHECK(cudaDeviceSynchronize());  // the memory is set; what follows is on another stream

  syncbn::BatchNorm layer({.channels = kChannels, .name = "stem.bn"}, communicator);
  syncbn::Saved saved;
  const auto execution = syncbn::Execution::on_stream(handle);
  layer.forward({.x = {in, DType::kFloat32, shape, strides, syncbn::Device::kCuda},
                 .y = {out, DType::kFloat32, shape, strides, syncbn::Device::kCuda}},
                saved, execution);
  communicator.wait({handle});  // with a time limit, unlike cudaStreamSynchronize
  layer.check(execution);       // throws if the ranks' calls did not match
  CHECK(cudaMemcpy(part.data(), out, bytes, cudaMemcpyDeviceToHost));
  return part;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU\n");
    return 0;
  }
  std::vector<float> x(100 * kChannels);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * i % 97) * 0.37f;
  }
  const auto expected = normalize(x, 0, 100, syncbn::cuda::nccl_unique_id(), 0, 1);

  const auto id = syncbn::cuda::nccl_unique_id();
  std::vector<std::vector<float>> parts(static_cast<std::size_t>(devices));
  std::vector<std::thread> ranks;
  for (int r = 0; r < devices; ++r) {
    ranks.emplace_back([&, r] {
      parts[static_cast<std::size_t>(r)] =
          normalize(x, 100 * r / devices, 100 * (r + 1) / devices, id, r, devices);
    });
  }
  std::vector<float> y;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].join();
    y.insert(y.end(), parts[r].begin(), parts[r].end());
  }
  const bool same = std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0;
  std::printf("%d GPUs and 1 GPU: %s\n", devices, same ? "the same bits" : "different bits");
  return same ? 0 : 1;
}
