// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
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
  const Step& step = rank.step;
  Place at(on_device);
  const DeviceArray<std::uint8_t> mask_there(on_device ? rank.mask : std::vector<std::uint8_t>(1));
  const DeviceArray<std::int64_t> tracked_there(1, rank.tracked);
  MaskView mask = rank.mask_view();
  if (on_device && !step.mask.empty()) {
    mask = {mask_there.data(), mask.sizes, Device::kCuda};
  }
  const auto given = [&](bool there, Tensor& tensor) {
    return there ? at(tensor) : MutableTensorView();
  };
  const auto dy_of = [&](Rank& of) {
    TensorView dy = at(of.dy);
    dy.strides = of.dy_view.strides;
    return dy;
  };
  const bool running = step.running_mean.present, residual = !step.residual.empty();
  BatchNorm layer(step.options, communicator);
  Saved saved;
  for (int i = 0; i < steps; ++i) {
    layer.forward({.x = at(rank.x),
                   .mask = mask,
                   .weight = given(step.weight.present, rank.weight),
                   .bias = given(step.bias.present, rank.bias),
                   .residual = given(residual, rank.residual),
                   .y = at(rank.y),
                   .running_mean = given(running, rank.running_mean),
                   .running_var = given(running, rank.running_var),
                   .num_batches_tracked = !running    ? nullptr
                                          : on_device ? tracked_there.data()
                                                      : &rank.tracked},
                  saved);
    layer.backward({.dy = dy_of(rank),
                    .x = at(rank.x),
                    .mask = mask,
                    .weight = given(step.weight.present, rank.weight),
                    .bias = given(step.bias.present, rank.bias),
                    .dx = at(rank.dx),
                    .dweight = at(rank.dweight),
                    .dbias = at(rank.dbias),
                    .dresidual = given(step.keep, rank.u),
                    .affine = step.affine},
                   saved);
  }
  Rank& other = ends.evaluated;
  layer.evaluate({.x = at(other.x),
                  .mask = mask,
                  .weight = given(step.weight.present, other.weight),
                  .bias = given(step.bias.present, other.bias),
                  .residual = given(residual, other.residual),
                  .running_mean = given(running, other.running_mean),
                  .running_var = given(running, other.running_var),
                  .y = at(other.y)});
  if (running) {
    layer.evaluate_backward({.dy = dy_of(other),
                             .x = at(other.x),
                             .mask = mask,
                             .weight = given(step.weight.present, other.weight),
                             .bias = given(step.bias.present, other.bias),
                             .residual = given(residual, other.residual),
                             .running_mean = given(running, other.running_mean),
                             .running_var = given(running, other.running_var),
                             .dx = at(other.dx),
                             .dweight = at(other.dweight),
                             .dbias = at(other.dbias),
                             .dresidual = given(step.keep, other.u)});
  }
  layer.check();
  ends.known = {at.fetch(saved.mean()), at.fetch(saved.var()), at.fetch(saved.rstd()),
                saved.count()};
  rank.tracked = on_device && running ? tracked_there.values()[0] : rank.tracked;
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
