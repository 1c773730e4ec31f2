// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "statistics/dtype.hpp"
#include "statistics/slots.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// Tensors whose elements lie more than 2^31 and 2^32 elements apart, and planes of more than 2^32,
// in memory of which only what is touched exists. The kernels of torch.nn.SyncBatchNorm have
// 32-bit indices and ones of 64 bits, and choose by the size.
namespace syncbn {
namespace {

constexpr DType kType = DType::kFloat16;
constexpr std::int64_t k31 = (std::int64_t{1} << 31) + 64;
constexpr std::int64_t k32 = (std::int64_t{1} << 32) + 64;

/// How a tensor lies in memory, and which part of it is looked at: samples and elements of planes
/// from these on, all channels.
struct Place {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t first_sample = 0;
  std::int64_t first_element = 0;
  std::vector<std::int64_t> part = {};  ///< (N, C, P) of that part; empty: all
};

class FarTensor {
 public:
  FarTensor(const Place& place, const Tensor& part) : place_(place), part_(part) {
    std::int64_t end = 1;
    for (std::size_t axis = 0; axis < place.sizes.size(); ++axis) {
      end += (place.sizes[axis] - 1) * place.strides[axis];
    }
    bytes_ = size(end) * size_of(kType);
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    for (std::int64_t i = 0; i < part.numel(); ++i) {
      testing::write_element(kType, at(i), part.get(i));
    }
  }
  ~FarTensor() { munmap(memory_, bytes_); }
  FarTensor(const FarTensor&) = delete;
  FarTensor& operator=(const FarTensor&) = delete;

  MutableTensorView view() const {
    return {memory_, kType, place_.sizes, place_.strides, Device::kCuda};
  }
  Doubles values() const {
    Doubles out(size(part_.numel()));
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = testing::read_element(kType, at(static_cast<std::int64_t>(i)));
    }
    return out;
  }

 private:
  std::byte* at(std::int64_t i) const {
    const Extents part = part_.view().sizes;
    std::int64_t e = i % part[2] + place_.first_element;
    std::int64_t offset = i / part[2] % part[1] * place_.strides[1] +
                          (i / part[2] / part[1] + place_.first_sample) * place_.strides[0];
    for (std::size_t axis = place_.sizes.size(); axis-- > 2;) {
      offset += e % place_.sizes[axis] * place_.strides[axis];
      e /= place_.sizes[axis];
    }
    return static_cast<std::byte*>(memory_) + offset * 2;
  }

  Place place_;
  Tensor part_;
  std::size_t bytes_ = 0;
  void* memory_ = nullptr;
};

/// The digits of both sums, from the first channel on.
Words digits(const Words& message) { return {message.begin() + kHeaderWords, message.end()}; }

/// The same from the scratch memory of sums whose kernel did not run to its end.
Words digits_of_scratch(Words& workspace, std::int64_t channels) {
  const Format format = format_of(kType);
  Words out;
  for (std::int64_t c = 0; c < channels; ++c) {
    std::int64_t* scratch = workspace.data() + c * (format.slots() + 3);
    Words words(size(format.words()));
    exact_sum(scratch, format, true).write(words.data());
    exact_sum(scratch, format, false).write(words.data() + format.first.digits);
    words.back() = scratch[format.slots()];  // flags
    out.insert(out.end(), words.begin(), words.end());
  }
  return out;
}

/// All passes over the part, against the CPU's over a copy of it. whole: the kernels ran to their
/// end; else only their last blocks, which have no more than the part to do.
void expect_same(const Place& place, bool whole) {
  SCOPED_TRACE(place.name);
  std::vector<std::int64_t> sizes = place.part;
  if (sizes.empty()) {
    sizes = {place.sizes[0], place.sizes[1], 1};
    for (std::size_t axis = 2; axis < place.sizes.size(); ++axis) {
      sizes[2] *= place.sizes[axis];
    }
  }
  const std::int64_t channels = sizes[1];
  Random random(24);
  const auto rough = [&] {
    Tensor out(kType, sizes);
    out.fill(rough_values(random, kType, sizes[0], sizes[1] * sizes[2]));
    return out;
  };
  const Tensor x = rough();
  const Tensor dy = rough();
  const Tensor zeros(kType, sizes, Doubles(size(x.numel()), 0.0));
  const FarTensor far_x(place, x);
  const FarTensor far_dy(place, dy);
  const FarTensor far_out(place, zeros);
  Tensor expected = zeros;
  const auto expect_out = [&](const char* what) {
    EXPECT_TRUE(same_bits(far_out.values(), expected.values())) << what;
  };
  Doubles mean(size(channels));
  for (double& value : mean) {
    value = random.signed_unit();
  }
  const Doubles rstd(size(channels), 0.75);
  const Doubles coefficients(size(3 * channels), 0.5);
  const ActivationGradient through{{ActivationKind::kRelu, 0}, {}, {}, nullptr};
  Executor& executor = serial_executor();

  Words workspace(size(cuda::workspace_words(kType, channels)), 0);
  Words message(size(message_words(kType, channels)), -1);
  Words reference = message;
  const auto expect_sums = [&](const char* what) {
    EXPECT_EQ(whole ? digits(message) : digits_of_scratch(workspace, channels), digits(reference))
        << what;
    workspace.assign(workspace.size(), 0);
  };
  local_moments(x.view(), {}, reference.data(), 0, executor);
  cuda::local_moments(far_x.view(), {}, {}, message.data(), workspace.data(), {});
  expect_sums("moments");
  local_gradients({dy.view(), x.view(), {}, mean.data(), rstd.data(), through, expected.view()},
                  reference.data(), 0, executor);
  cuda::local_gradients(
      {far_dy.view(), far_x.view(), {}, mean.data(), rstd.data(), through, far_out.view()}, nullptr,
      message.data(), workspace.data(), {});
  expect_sums("gradients");
  expect_out("u");

  normalize({x.view(), {}, mean.data(), rstd.data(), {}, {}, dy.view(), expected.view()}, executor);
  cuda::normalize(
      {far_x.view(), {}, mean.data(), rstd.data(), {}, {}, far_dy.view(), far_out.view()}, {});
  expect_out("y");
  input_gradient({dy.view(),
                  x.view(),
                  {},
                  mean.data(),
                  rstd.data(),
                  coefficients.data(),
                  through,
                  expected.view()},
                 executor);
  cuda::input_gradient({far_dy.view(),
                        far_x.view(),
                        {},
                        mean.data(),
                        rstd.data(),
                        coefficients.data(),
                        through,
                        far_out.view()},
                       {});
  expect_out("dx");
  std::vector<std::uint8_t> mask(size(activation_mask_bytes(x.view())));
  recover_input({x.view(), mean.data(), rstd.data(), {}, {}, expected.view(), mask.data(), 0.125},
                executor);
  cuda::recover_input(
      {far_x.view(), mean.data(), rstd.data(), {}, {}, far_out.view(), nullptr, 0.125}, {});
  expect_out("recovered x");
}

const std::vector<Place>& far_apart() {
  static const std::vector<Place> kPlaces = {
      {"planes, samples", {2, 3, 16}, {k31, 16, 1}},
      {"planes, samples", {2, 3, 16}, {k32, 16, 1}},
      {"planes, channels", {2, 3, 16}, {16, k32, 1}},
      {"single elements of planes", {2, 3, 17}, {17, k32 + 1, 1}},
      {"rows, samples", {2, 8, 3}, {k32, 1, 8}},
      {"rows, elements", {2, 8, 3}, {8, 1, k32}},
      {"single elements of rows", {2, 7, 3}, {7, 1, k31 + 1}},
      {"2-D input", {3, 8}, {k32, 1}},
      {"single elements of 2-D input", {3, 7}, {k32 + 1, 1}},
      {"any strides, samples", {2, 2, 2, 2}, {k32, 3, 16, 7}},
      {"any strides, channels", {2, 2, 2, 2}, {3, k32, 16, 7}},
      {"any strides, elements", {2, 2, 2, 2}, {3, 32, k32, 7}},
  };
  return kPlaces;
}

TEST(CudaFar, StridesBeyond32BitsExact) {
  for (const Place& place : far_apart()) {
    expect_same(place, true);
  }
}

/// Its kernel takes all elements of a channel in one block, and its bits depend on the layout: so
/// against itself, with the same layout and elements side by side.
TEST(CudaFar, WelfordStridesBeyond32BitsExact) {
  Random random(25);
  for (const Place& place : far_apart()) {
    SCOPED_TRACE(place.name);
    std::vector<std::int64_t> sizes = {place.sizes[0], place.sizes[1], 1};
    for (std::size_t axis = 2; axis < place.sizes.size(); ++axis) {
      sizes[2] *= place.sizes[axis];
    }
    Tensor x(kType, sizes, place.strides[1] == 1 ? Memory::kRows : Memory::kPlanes);
    x.fill(rough_values(random, kType, sizes[0], sizes[1] * sizes[2]));
    const FarTensor far_x(place, x);
    Words expected(size(kHeaderWords + welford_words(kType, sizes[1])), -1);
    Words message = expected;
    cuda::local_welford(on_cuda(x.view()), {}, {}, expected.data(), {});
    cuda::local_welford(far_x.view(), {}, {}, message.data(), {});
    EXPECT_EQ(message, expected);
  }
}

/// So large a grid that a block has one job, of which only the last blocks run: the host's
/// division of the work, and the end of what a kernel counts up to.
TEST(CudaFar, PlanesBeyond32BitsExact) {
  constexpr std::int64_t kLong = (std::int64_t{1} << 32) + 512 + 8 * 25;
  constexpr std::int64_t kTail = 8 * 25;
  emulation::settings() = {.multiprocessors = 1 << 23, .last_blocks = 8};
  const std::int64_t from = kLong - kTail;  // a segment begins there
  for (const Place& place : std::vector<Place>{
           {"a plane", {1, 1, kLong}, {kLong, kLong, 1}, 0, from, {1, 1, kTail}},
           {"a plane by single elements", {1, 1, kLong + 1}, {1, 1, 1}, 0, from, {1, 1, kTail + 1}},
           {"rows", {1, 8, kLong}, {0, 1, 8}, 0, from, {1, 8, kTail}},
           {"rows by single elements", {1, 7, kLong}, {0, 1, 7}, 0, from, {1, 7, kTail}},
           {"2-D input", {kLong, 8}, {8, 1}, from, 0, {kTail, 8, 1}},
           {"any strides",
            {1, 1, 2, kLong},
            {0, 0, 2 * kLong + 2, 2},
            0,
            2 * kLong - 2 * kTail,
            {1, 1, 2 * kTail}}}) {
    expect_same(place, false);
  }
  emulation::settings() = {};
}

}  // namespace
}  // namespace syncbn
