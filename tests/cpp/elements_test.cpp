// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/packed.hpp"
#include "statistics/dtype.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// The element-wise kernels themselves, so that small tensors are streamed as well: every place of
// a plane's end in a vector, outputs that begin anywhere, parts as threads have them.
namespace syncbn::cpu {
namespace {

using testing::available_levels;
using testing::LevelScope;
using testing::Random;
using testing::round_to;

constexpr ElementPass kPasses[] = {
    ElementPass::kNormalize, ElementPass::kNormalizeActivated, ElementPass::kNormalizeResidual,
    ElementPass::kGradient,  ElementPass::kGradientActivated,  ElementPass::kGradientActivationMask,
    ElementPass::kRecover};

bool is_gradient(ElementPass pass) {
  return pass == ElementPass::kGradient || pass == ElementPass::kGradientActivated ||
         pass == ElementPass::kGradientActivationMask;
}

struct Shape {
  DType dtype = DType::kFloat32;
  bool by_rows = false;
  std::int64_t samples = 1;
  std::int64_t channels = 1;
  std::int64_t plane = 1;
  std::int64_t elements() const { return samples * channels * plane; }
};

struct alignas(64) Line {
  std::byte bytes[64];
};

/// A tensor `offset` elements from the beginning of a cache line, with gaps, or not, between its
/// samples and its planes (rows). All other bytes are ones.
class Place {
 public:
  Place(const Shape& s, std::int64_t offset, std::int64_t sample_gap, std::int64_t run_gap)
      : dtype_(s.dtype), sizes_{s.samples, s.channels, s.plane} {
    const std::int64_t run = (s.by_rows ? s.channels : s.plane) + run_gap;
    const std::int64_t sample = run * (s.by_rows ? s.plane : s.channels) + sample_gap;
    strides_ = {sample, s.by_rows ? 1 : run, s.by_rows ? run : 1};
    const auto size = static_cast<std::int64_t>(size_of(s.dtype));
    storage_.resize(static_cast<std::size_t>((s.samples * sample + offset) * size / 64 + 4));
    std::memset(storage_.data(), 0xff, bytes());
    begin_ = 64 + offset * size;
  }
  SampleView view(const std::vector<std::uint8_t>& mask = {}) const {
    const TensorView tensor(storage_[0].bytes + begin_, dtype_, sizes_, strides_);
    return mask.empty() ? SampleView(tensor)
                        : SampleView(tensor, {mask.data(), {sizes_[0], sizes_[2]}});
  }
  /// Element i of (n, c, e) in row-major order.
  std::byte* at(std::int64_t i) {
    const std::int64_t e = i % sizes_[2];
    const std::int64_t c = i / sizes_[2] % sizes_[1];
    const std::int64_t n = i / sizes_[2] / sizes_[1];
    const std::int64_t position = n * strides_[0] + c * strides_[1] + e * strides_[2];
    return storage_[0].bytes + begin_ + position * static_cast<std::int64_t>(size_of(dtype_));
  }
  double get(std::int64_t i) { return testing::read_element(dtype_, at(i)); }
  void fill(const std::vector<double>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      testing::write_element(dtype_, at(static_cast<std::int64_t>(i)), values[i]);
    }
  }
  /// Nothing was written around the elements. Ends their life.
  bool gaps_untouched() {
    for (std::int64_t i = 0; i < sizes_[0] * sizes_[1] * sizes_[2]; ++i) {
      std::memset(at(i), 0xff, size_of(dtype_));
    }
    return std::count(storage_[0].bytes, storage_[0].bytes + bytes(), std::byte{0xff}) ==
           static_cast<std::ptrdiff_t>(bytes());
  }

 private:
  std::size_t bytes() const { return storage_.size() * sizeof(Line); }
  DType dtype_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::vector<Line> storage_;
  std::int64_t begin_ = 0;
};

std::vector<double> values_of(Random& random, const Shape& s) {
  const double ends[] = {std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity(),
                         std::numeric_limits<double>::quiet_NaN(),
                         -0.0,
                         0.0,
                         0x1p-149,
                         -0x1p-130,
                         0x1.8p-126,
                         3e38,
                         65504};
  std::vector<double> values(static_cast<std::size_t>(s.elements()));
  for (double& value : values) {
    value = random.one_in(25)
                ? ends[random.between(0, 9)]
                : std::ldexp(random.signed_unit(), static_cast<int>(random.between(-12, 3)));
    value = round_to(s.dtype, value);
  }
  return values;
}

/// Per-channel numbers; some channels' results are subnormal or overflow.
std::vector<double> constants_of(Random& random, const Shape& s) {
  std::vector<double> values(static_cast<std::size_t>(s.channels));
  for (double& value : values) {
    value = random.signed_unit() * (random.one_in(6) ? std::exp2(random.between(-134, 126)) : 1);
  }
  return values;
}

bool takes_other(ElementPass pass) {
  return pass == ElementPass::kNormalizeResidual || is_gradient(pass);
}

/// One pass over one tensor, with everything it takes.
struct Job {
  Job(Random& random, const Shape& s);
  void run_reference(const SampleView& to);
  void check_level(const Kernels& kernels);

  Shape shape;
  ElementPass pass;
  Activation activation;
  bool stream;
  bool in_place;
  bool with_bits;
  std::vector<std::uint8_t> mask;  ///< or none
  std::vector<double> constants[7];
  Place x, other, out, expected;
  ActivationMaskLayout layout;
  std::vector<std::uint8_t> bits;           ///< before the pass
  std::vector<std::uint8_t> bits_expected;  ///< after it
  NormalizeConstants affine{};
  GradientConstants slopes{};
};

Place random_place(Random& random, const Shape& s) {
  const std::int64_t offset = random.one_in(3)   ? 0
                              : random.one_in(2) ? 16 * random.between(1, 3)  // half a line
                                                 : random.between(0, 63);
  return {s, offset, random.one_in(4) ? 5 : 0, random.one_in(6) ? 3 : 0};
}

Job::Job(Random& random, const Shape& s)
    : shape(s),
      pass(kPasses[random.between(0, 6)]),
      stream(!random.one_in(3)),
      in_place(random.one_in(4)),
      with_bits(
          pass == ElementPass::kRecover || pass == ElementPass::kGradientActivationMask ||
          ((pass == ElementPass::kNormalizeActivated || pass == ElementPass::kNormalizeResidual) &&
           random.one_in(2))),
      x(random_place(random, s)),
      other(random_place(random, s)),
      out(random_place(random, s)),
      expected(s, 0, 0, 0),
      layout(x.view()),
      bits(static_cast<std::size_t>(layout.bytes)) {
  if (pass != ElementPass::kNormalize && pass != ElementPass::kGradient) {
    const bool relu = pass != ElementPass::kRecover && random.one_in(2);
    activation = {relu ? ActivationKind::kRelu : ActivationKind::kLeakyRelu, 0.3};
  }
  if (random.one_in(4)) {
    for (std::int64_t i = 0; i < s.samples * s.plane; ++i) {
      mask.push_back(random.one_in(3) ? 0 : static_cast<std::uint8_t>(random.between(1, 255)));
    }
  }
  x.fill(values_of(random, s));
  other.fill(values_of(random, s));
  for (auto& array : constants) {
    array = constants_of(random, s);
  }
  const auto& k = constants;
  affine = {k[0].data(), k[1].data(), k[2].data(), k[3].data()};
  slopes = {k[0].data(), k[1].data(), k[4].data(), k[5].data(), k[6].data()};
  for (std::uint8_t& byte : bits) {
    byte = static_cast<std::uint8_t>(random.bits());
  }
  bits_expected = bits;
  run_reference(expected.view());
}

void Job::run_reference(const SampleView& to) {
  const SampleView from = x.view(mask);
  const SampleView second = other.view();
  std::uint8_t* written = with_bits ? bits_expected.data() : nullptr;
  if (pass == ElementPass::kRecover) {
    reference::recover_input(from, to, written, affine, activation.negative_slope,
                             serial_executor());
  } else if (is_gradient(pass)) {
    reference::input_gradient(second, from, to, slopes, {activation, affine, written},
                              serial_executor());
  } else {
    reference::normalize(from, takes_other(pass) ? &second : nullptr, to, written, affine,
                         activation, serial_executor());
  }
}

void Job::check_level(const Kernels& kernels) {
  SCOPED_TRACE(std::string(kernels.name) + ", " + name(shape.dtype) +
               (shape.by_rows ? " rows (" : " planes (") + std::to_string(shape.samples) + ", " +
               std::to_string(shape.channels) + ", " + std::to_string(shape.plane) + "), pass " +
               std::to_string(static_cast<int>(pass)) + (stream ? ", streamed" : "") +
               (in_place ? ", in place" : "") + (with_bits ? ", bits" : "") +
               (mask.empty() ? "" : ", mask"));
  Place from = x;
  Place second = other;
  Place apart = out;
  Place& to = !in_place ? apart : takes_other(pass) ? second : from;
  std::vector<std::uint8_t> bits_actual = bits;
  PackedConstants packed(shape.channels);
  if (pass == ElementPass::kRecover) {
    packed.set_inverse(affine, shape.channels);
  } else {
    packed.set_affine(affine, 0, shape.channels);
    packed.set_gradient(slopes, 0, shape.channels);
  }
  ElementsTask task;
  const SampleView second_view = second.view();
  set_tensors(task, from.view(mask), takes_other(pass) ? &second_view : nullptr, to.view());
  task.constants = packed.view();
  task.activation = activation_constants(activation);
  if (pass == ElementPass::kRecover) {
    task.activation = {false, 1.0f / static_cast<float>(activation.negative_slope)};
  }
  task.activation_mask =
      activation_mask_operand(from.view(), with_bits ? bits_actual.data() : nullptr);
  task.stream = stream;
  const std::int64_t blocks = (shape.plane + kElementBlock - 1) / kElementBlock;
  const std::int64_t items =
      shape.samples * (shape.by_rows ? shape.plane : shape.channels * blocks);
  // Three parts, as threads have them, the middle one last: its neighbours have to stay.
  const std::int64_t cuts[] = {0, items / 3, items - items / 3, items};
  for (const int part : {0, 2, 1}) {
    task.begin = cuts[part];
    task.end = cuts[part + 1];
    (shape.by_rows ? kernels.map_rows : kernels.map_planes)(shape.dtype, pass, task);
  }
  for (std::int64_t i = 0; i < shape.elements(); ++i) {
    ASSERT_TRUE(testing::same_bits(to.get(i), expected.get(i)))
        << "element " << i << std::hexfloat << " is " << to.get(i) << ", expected "
        << expected.get(i);
    const std::int64_t n = i / shape.plane / shape.channels;
    const std::int64_t e = i % shape.plane;
    const std::int64_t bit = layout.bit(n, i / shape.plane % shape.channels, e);
    const auto of = [&](const std::vector<std::uint8_t>& all) {
      return all[static_cast<std::size_t>(bit / 8)] >> bit % 8 & 1;
    };
    // Bits of elements that do not count mean nothing.
    if (with_bits && x.view(mask).counts(n, e)) {
      ASSERT_EQ(of(bits_actual), of(bits_expected)) << "bit of element " << i;
    }
  }
  ASSERT_TRUE(to.gaps_untouched());
}

void check(Random& random, const Shape& shape) {
  Job job(random, shape);
  if (job.with_bits && job.layout.by_rows != shape.by_rows) {
    return;  // one channel, or planes of one element: bits are in the other order
  }
  for (const std::string& level : available_levels()) {
    const LevelScope scope(level);
    if (active_kernels() != nullptr) {
      job.check_level(*active_kernels());
    }
  }
}

constexpr DType kVectorized[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Planes of 1 to 70 elements end at every place of a vector of up to 32.
TEST(Elements, ShortPlanesExact) {
  Random random(62);
  for (std::int64_t plane = 1; plane <= 70; ++plane) {
    for (const DType dtype : kVectorized) {
      for (int round = 0; round < 10 && !HasFatalFailure(); ++round) {
        check(random, {dtype, false, random.between(1, 3), random.between(1, 40), plane});
      }
    }
  }
}

TEST(Elements, LongPlanesExact) {
  Random random(63);
  const std::vector<std::int64_t> planes = {196, 256, 511, 784, 3136, 16384, 16385, 33000};
  for (int round = 0; round < 150 && !HasFatalFailure(); ++round) {
    const std::int64_t plane = random.pick(planes);
    check(random, {kVectorized[random.between(0, 2)], false, random.between(1, 2),
                   random.between(1, 1 + 40000 / plane), plane});
  }
}

TEST(Elements, RowsExact) {
  Random random(64);
  for (std::int64_t channels = 1; channels <= 70; ++channels) {
    for (int round = 0; round < 10 && !HasFatalFailure(); ++round) {
      check(random, {kVectorized[round % 3], true, random.between(1, 3), channels,
                     random.one_in(4) ? 1 : random.between(1, 40)});
    }
  }
}

// More than 256 channels, and more than 256 KiB: rows go in other orders then.
TEST(Elements, LongRowsExact) {
  Random random(65);
  const std::vector<std::int64_t> channels = {48,  64,  80,  96,  128, 200,  256,
                                              257, 272, 300, 512, 520, 1024, 2048};
  for (int round = 0; round < 80 && !HasFatalFailure(); ++round) {
    const std::int64_t some = random.pick(channels);
    check(random, {kVectorized[round % 3], true, random.between(1, 3), some,
                   random.between(1, (round % 8 == 0 ? 60000 : 20000) / some)});
  }
}

}  // namespace
}  // namespace syncbn::cpu
