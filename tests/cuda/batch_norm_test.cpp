// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device.hpp"
#include "groups.hpp"
#include "placed_rank.hpp"
#include "properties.hpp"
#include "support.hpp"

// A layer on CUDA against the same layer on CPU, rank for rank and bit for bit: every pass, type,
// memory layout and option. torch.nn.SyncBatchNorm has no CPU form to compare with.
namespace syncbn::testing {
namespace {

/// Where a rank's tensors lie: where they are, or in copies on the device.
class Place {
 public:
  explicit Place(bool on_device) : on_device_(on_device) {}
  MutableTensorView operator()(Tensor& tensor) {
    return on_device_ ? there_.try_emplace(&tensor, tensor).first->second.view() : tensor.view();
  }
  void fetch() {
    for (const auto& [tensor, copy] : there_) {
      *tensor = copy.fetch();
    }
  }
  std::vector<double> fetch(std::span<const double> values) const {
    std::vector<double> out(values.begin(), on_device_ ? values.begin() : values.end());
    if (on_device_) {
      out.resize(values.size());
      copy_from_device(out.data(), values.data(), values.size_bytes());
    }
    return out;
  }

 private:
  bool on_device_;
  std::map<Tensor*, DeviceTensor> there_;
};

/// A rank's tensors in training, others in evaluation, and its statistics.
struct Ends {
  Rank trained, evaluated;
  Outcome::Known known;
};

/// `steps` steps of one layer on the same tensors, and an evaluation.
template <class Communicator>
void run(Ends& ends, int steps, Communicator& communicator, bool on_device) {
  Rank& rank = ends.trained;
  Place at(on_device);
  const DeviceArray<std::uint8_t> mask(on_device ? rank.mask : std::vector<std::uint8_t>(1));
  const DeviceArray<std::int64_t> tracked(1, rank.tracked);
  for (Rank* one : {&rank, &ends.evaluated}) {
    one->at = std::ref(at);
    if (on_device) {
      one->tracked_there = tracked.data();
      one->mask_there =
          rank.mask.empty() ? MaskView() : MaskView{mask.data(), rank.mask_sizes, Device::kCuda};
    }
  }
  BatchNorm layer(rank.step.options, communicator);
  Saved saved;
  for (int i = 0; i < steps; ++i) {
    rank.forward(layer, saved, serial_executor());
    rank.backward(layer, saved, rank.x_view(), serial_executor());
  }
  ends.evaluated.evaluate(layer, serial_executor());
  layer.check();
  ends.known = {at.fetch(saved.mean()), at.fetch(saved.var()), at.fetch(saved.rstd()),
                saved.count()};
  rank.tracked = on_device ? tracked.values()[0] : rank.tracked;
  at.fetch();
}

void expect_same(const Ends& cuda, const Ends& cpu) {
  const std::pair<const char*, Tensor Rank::*> all[] = {{"y", &Rank::y},
                                                        {"dx", &Rank::dx},
                                                        {"the residual's gradient", &Rank::u},
                                                        {"dweight", &Rank::dweight},
                                                        {"dbias", &Rank::dbias},
                                                        {"running mean", &Rank::running_mean},
                                                        {"running var", &Rank::running_var}};
  for (const auto& [name, member] : all) {
    for (const auto end : {&Ends::trained, &Ends::evaluated}) {
      const Tensor& got = (cuda.*end).*member;
      EXPECT_TRUE(same_bits(got.values(), ((cpu.*end).*member).values())) << name;
      EXPECT_TRUE(got.gaps_untouched()) << name;
    }
  }
  EXPECT_TRUE(same_bits(cuda.known.mean, cpu.known.mean)) << "mean";
  EXPECT_TRUE(same_bits(cuda.known.var, cpu.known.var)) << "var";
  EXPECT_TRUE(same_bits(cuda.known.rstd, cpu.known.rstd)) << "rstd";
  EXPECT_EQ(cuda.known.count, cpu.known.count);
  EXPECT_EQ(cuda.trained.tracked, cpu.trained.tracked);
}

/// Expects equal bits of all results on all ranks, and gaps untouched.
void compare_layers(const Step& step, const Split& split, Random& random, int steps = 1) {
  SCOPED_TRACE(step.text() + ", ranks: " + std::to_string(split.size()));
  std::vector<Ends> cpu;
  for (const auto& samples : split) {
    Placement placement(random);
    placement.in_place = placement.residual_in_place = false;
    const Rank rank(step, samples, placement);
    cpu.push_back({rank, rank, {}});
  }
  std::vector<Ends> cuda = cpu;
  const auto ranks = static_cast<int>(split.size());
  ThreadGroup of_cpu(ranks), of_cuda(ranks);
  expect_no_errors(run_ranks(
      ranks, [&](int r) { run(cpu[static_cast<std::size_t>(r)], steps, of_cpu.rank(r), false); }));
  expect_no_errors(run_ranks(ranks, [&](int r) {
    const DeviceTurn turn;
    run(cuda[static_cast<std::size_t>(r)], steps, *device_communicator(of_cuda.rank(r)), true);
  }));
  for (std::size_t r = 0; r < split.size(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    expect_same(cuda[r], cpu[r]);
  }
}

void random_steps(int first, int last) {
  for (int i = first; i < last && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    Random random(static_cast<std::uint64_t>(1000 + i));
    Step step(random);
    step.affine = random.one_in(2) ? AffineGradients::kGlobal : AffineGradients::kShare;
    const Split split = random_split(random, step.sizes[0], random.one_in(2) ? 1 : 3);
    compare_layers(step, split, random, static_cast<int>(random.between(1, 3)));
  }
}

TEST(CudaBatchNorm, RandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(0, device_cases());
}

/// What compute-sanitizer runs, at a hundredth of the speed.
TEST(CudaBatchNorm, FewRandomStepsExact) {
  SYNCBN_NEEDS_DEVICE();
  random_steps(500, 516);
}

/// Enough of everything that many blocks share a channel and many channels a block.
TEST(CudaBatchNorm, LargeShapesExact) {
  SYNCBN_NEEDS_DEVICE();
  const bool gpu = device_cases() > 100;
  Random random(31);
  for (const DType dtype : kDtypes) {
    for (const auto& spatial : std::vector<std::vector<std::int64_t>>{{}, {14, 14}, {57, 57}}) {
      const std::int64_t samples = spatial.empty() && gpu ? 3004 : 16;
      std::vector<std::int64_t> sizes = {samples, gpu ? 70 : 6};
      sizes.insert(sizes.end(), spatial.begin(), spatial.end());
      std::vector<std::int64_t> first = whole(samples)[0], last(first.end() - 4, first.end());
      first.resize(first.size() - 4);
      compare_layers(Step(random, dtype, sizes), {first, last}, random);
    }
  }
}

/// Welford records on CUDA are merged in another order than on CPU; where a rank has one element of
/// a channel, there is nothing to merge, and the whole layer has the CPU's bits.
TEST(CudaBatchNorm, WelfordOfSingleElementsExact) {
  SYNCBN_NEEDS_DEVICE();
  for (int i = 0; i < 16 && !HasFailure(); ++i) {
    Random random(static_cast<std::uint64_t>(5000 + i));
    const Split split = i % 3 == 0   ? Split{{0}}
                        : i % 2 == 0 ? Split{{0}, {}, {1}}
                                     : Split{{0}, {1}, {2}};
    const std::int64_t samples = i % 3 == 0 ? 1 : i % 2 == 0 ? 2 : 3;
    Step step(random, kDtypes[i % 4], {samples, random.pick<std::int64_t>({1, 2, 5, 8, 33, 64})});
    step.options.statistics = Statistics::kWelford;
    step.options.activation.kind = static_cast<ActivationKind>(random.between(0, 2));
    if (random.one_in(2)) {
      step.residual = step.dy;
      step.keep = true;
    }
    for (std::int64_t n = 0; i % 3 == 1 && n < samples; ++n) {
      step.mask.push_back(random.one_in(4) ? 0 : 1);
    }
    compare_layers(step, split, random, 2);
  }
}

}  // namespace
}  // namespace syncbn::testing
