// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bad_input.hpp"
#include "groups.hpp"
#include "small_step.hpp"
#include "step_tensors.hpp"
#include "syncbn/step.hpp"

// Numbers that the caller's classes and structs say: a rank, a size, a count, an enumeration.
namespace syncbn::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int kLeast = std::numeric_limits<int>::min();
constexpr int kMost = std::numeric_limits<int>::max();

struct Said {
  int rank;
  int ranks;
};

/// A rank of another group, which says of itself what it is told to.
class Claims final : public Communicator {
 public:
  explicit Claims(Communicator& inner) : said{inner.rank(), inner.size()}, inner_(inner) {}
  int rank() const override { return said.rank; }
  int size() const override { return said.ranks; }
  void all_reduce_sum(std::span<std::int64_t> words) override { inner_.all_reduce_sum(words); }
  void abandon(const std::string& reason) override { inner_.abandon(reason); }
  void refuse(const std::string& reason) override { inner_.refuse(reason); }
  void reset() { begin_again(); }
  Said said;

 private:
  Communicator& inner_;
};

constexpr std::pair<Said, const char*> kWrongPlaces[] = {
    {{2, 2}, "rank: got 2, expected 0 to 1"},  // ranks that are numbered from 1
    {{-1, 2}, "rank: got -1, expected 0 to 1"},
    {{kMost, 2}, "rank: got 2147483647, expected 0 to 1"},
    {{kLeast, 2048}, "rank: got -2147483648, expected 0 to 2047"},
    {{1, 0}, "ranks: got 0, expected 1 to 2048"},
    {{1, -2}, "ranks: got -2, expected 1 to 2048"},
    {{1, 2049}, "ranks: got 2049, expected 1 to 2048"},
    {{1, kMost}, "ranks: got 2147483647, expected 1 to 2048"},
};

/// The rank gets `text`, and the other one hears of it.
void expect_told(bool odd, const std::string& text, const std::function<void()>& call) {
  const std::string got = odd ? thrown_text<InvalidArgument>(call) : thrown_text<PeerLost>(call);
  EXPECT_TRUE(contains(got, text));
  EXPECT_TRUE(odd || contains(got, "rank 1 refused its call"));
}

TEST(Numbers, OfAPlaceInAGroupAreRefusedWhereALayerIsMade) {
  for (const auto& [place, text] : kWrongPlaces) {
    ThreadGroup group(2, std::chrono::seconds(20));
    expect_no_errors(run_ranks(2, [&, &place = place, &text = text](int r) {
      Claims claims(group.rank(r));
      claims.said = r == 1 ? place : claims.said;
      SmallStep step({2, 3, 4});
      Saved saved;
      expect_told(r == 1, text, [&] {  // other options: the ranks then say in turn what they do
        BatchNorm layer({.channels = 3, .name = "bn", .eps = r == 1 ? 1e-3 : 1e-5}, claims);
        step.forward(layer, saved);
      });
      expect_told(r == 1, text, [&] {
        StepTensors op([](StepTensors& s) { s.as_op = true; });
        op.forward(claims);
      });
    }));
  }
}

TEST(Numbers, OfAPlaceThatChangesAreRefusedInTheCall) {
  auto places =
      std::vector<std::pair<Said, std::string>>(std::begin(kWrongPlaces), std::end(kWrongPlaces));
  places.push_back({{0, 2}, "communicator: got rank 0 of 2, expected rank 1 of 2"});
  places.push_back({{1, 3}, "communicator: got rank 1 of 3, expected rank 1 of 2"});
  for (const Statistics statistics : {Statistics::kReproducible, Statistics::kWelford}) {
    ThreadGroup group(2, std::chrono::seconds(20));
    expect_no_errors(run_ranks(2, [&](int r) {
      Claims claims(group.rank(r));
      BatchNorm layer({.channels = 3, .name = "bn", .statistics = statistics}, claims);
      SmallStep step({2, 3, 4});
      Saved saved, unused;
      step.forward(layer, saved);
      for (const auto& [place, text] : places) {
        const Said right = claims.said;
        claims.said = r == 1 ? place : right;
        expect_told(r == 1, text, [&] { step.forward(layer, unused); });
        expect_told(r == 1, text, [&] { step.backward(layer, saved); });
        claims.said = right;
        step.backward(layer, saved);
      }
    }));
  }
}

/// A group may come back with other ranks.
TEST(Numbers, OfAPlaceMayChangeWithAReset) {
  Claims claims(self_communicator());
  BatchNorm layer({.channels = 3, .name = "bn"}, claims);
  SmallStep step({2, 3, 4});
  Saved saved;
  step.forward(layer, saved);
  claims.said = {1, 2};
  EXPECT_THROW(step.forward(layer, saved), InvalidArgument);
  claims.reset();
  // The other rank, which does not exist, brings zeros.
  EXPECT_TRUE(contains(thrown_text<DivergenceError>([&] { step.forward(layer, saved); }),
                       "rank 1 of 2: the ranks did not make the same call"));
}

using Steps = std::vector<std::pair<const char*, std::function<void(A)>>>;

/// Every door with a step that `change` spoiled.
template <class Step>
Steps doors(const std::function<void(Step&)>& change) {
  const auto with = [=](const auto& door) {
    return [=](A a) {
      GroupSum alone;
      Step step;
      if constexpr (std::is_same_v<Step, ForwardStep>) {
        step = forward_step(a);
      } else {
        step = backward_step(a);
      }
      change(step);
      door(step, a, alone);
    };
  };
  if constexpr (std::is_same_v<Step, ForwardStep>) {
    return {{"begin", with([](const auto& s, A a, GroupSum&) {
               forward_begin(s, a.message.data(), a.executor);
             })},
            {"finish",
             with([](const auto& s, A a, GroupSum&) { forward_finish(s, merged(a), a.executor); })},
            {"update", with([](const auto& s, A a, GroupSum&) { forward_update(s, a.executor); })},
            {"at once", with([](const auto& s, A a, GroupSum& group) {
               forward_at_once(s, group, a.executor);
             })}};
  } else {
    return {{"begin", with([](const auto& s, A a, GroupSum&) {
               backward_begin(s, a.message.data(), nullptr, a.executor);
             })},
            {"finish", with([](const auto& s, A a, GroupSum&) {
               backward_finish(s, a.message.data(), merged(a), a.executor);
             })},
            {"at once", with([](const auto& s, A a, GroupSum& group) {
               backward_at_once(s, group, a.executor);
             })}};
  }
}

template <class Step>
void add(std::vector<Case>& cases, const char* text, const std::function<void(Step&)>& change) {
  for (const auto& [door, call] : doors<Step>(change)) {
    cases.push_back({door, call, {text}});
  }
}

TEST(Numbers, OfAStepAreRefusedAtEveryDoorExact) {
  constexpr auto kActivation = static_cast<ActivationKind>(17);
  constexpr auto kDevice = static_cast<Device>(7);
  constexpr auto kType = static_cast<DType>(99);
  std::vector<Case> cases;
  using F = ForwardStep;
  add<F>(cases, "statistics: got number 9, expected reproducible or welford",
         [](F& s) { s.statistics = static_cast<Statistics>(9); });
  add<F>(cases, "eps: got nan, expected a finite number", [](F& s) { s.pass.eps = kNan; });
  add<F>(cases, "eps: got -1, expected a finite number", [](F& s) { s.pass.eps = -1; });
  add<F>(cases, "activation: got number 17, expected none, relu or leaky_relu",
         [](F& s) { s.pass.activation.kind = kActivation; });
  add<F>(cases, "activation.negative_slope: got nan, expected a finite number",
         [](F& s) { s.pass.activation = {ActivationKind::kLeakyRelu, kNan}; });
  add<F>(cases, "momentum: got 1.5, expected a number in [0, 1]",
         [](F& s) { s.running.momentum = 1.5; });
  add<F>(cases, "momentum: got nan, expected a number in [0, 1]",
         [](F& s) { s.running.momentum = kNan; });
  add<F>(cases, "num_batches_tracked: got null", [](F& s) { s.running.momentum.reset(); });
  add<F>(cases, "running_var: got dtype number 99", [](F& s) { s.running.var.dtype = kType; });
  add<F>(cases, "x: got dtype number 99", [](F& s) { s.pass.x.dtype = kType; });
  add<F>(cases, "x: got device number 7, expected CPU or CUDA",
         [](F& s) { s.pass.x.device = kDevice; });
  using B = BackwardStep;
  add<B>(cases, "x: got dtype number 99", [](B& s) { s.pass.x.dtype = kType; });
  add<B>(cases, "x: got device number 7, expected CPU or CUDA",
         [](B& s) { s.pass.x.device = kDevice; });
  add<B>(cases, "activation: got number 17, expected none, relu or leaky_relu",
         [](B& s) { s.pass.through.activation.kind = kActivation; });
  add<B>(cases, "activation.negative_slope: got nan, expected a finite number",
         [](B& s) { s.pass.through.activation = {ActivationKind::kLeakyRelu, kNan}; });
  static const std::int64_t kNegative[kInfoWords] = {-5, 0};
  static const std::int64_t kLarge[kInfoWords] = {kMaxCount + 1, 0};
  for (const auto& [count, text] : {std::pair{kNegative, "info: got -5, expected 0 to 2^36"},
                                    {kLarge, "info: got 68719476737, expected 0 to 2^36"}}) {
    add<B>(cases, text, [count = count](B& s) { s.info = count; });
  }
  expect_refused(cases);
}

void sum(A a, const std::function<void(GroupSum&)>& change) {
  GroupSum group;
  change(group);
  forward_at_once(forward_step(a), group, a.executor);
}

/// Says that it has so many threads.
class Threadless final : public Executor {
 public:
  explicit Threadless(int threads) : threads_(threads) {}
  void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t, const Body& body) override {
    body(begin, end);
  }
  int concurrency() const override { return threads_; }

 private:
  int threads_;
};

const std::vector<Case> kCases = {
    {"merged ranks",
     [](A a) {
       Merged none = merged(a);
       none.ranks = -3;
       forward_finish(forward_step(a), none, a.executor);
     },
     {"ranks: got -3", "expected 1 to 2048"}},
    {"merged dtype",
     [](A a) {
       Merged odd = merged(a);
       odd.dtype = kUnknown;
       backward_finish(backward_step(a), a.message.data(), odd, a.executor);
     },
     {"merged.dtype: got dtype number 9", "expected float16"}},
    {"a merged count",
     [](A a) {
       const std::vector<std::int64_t> words = {-8, 0, 0, 0, 0, 0, 0, 0};
       forward_finish(forward_step(a), {words.data()}, a.executor);
     },
     {"x: got -8 elements per channel over all ranks", "expected 0 to 2^36"}},
    {"a sum of no ranks",
     [](A a) { sum(a, [](GroupSum& group) { group.ranks = 0; }); },
     {"ranks: got 0", "expected 1 to 2048"}},
    {"ranks without a sum",
     [](A a) { sum(a, [](GroupSum& group) { group.ranks = 3; }); },
     {"sum: got a null pointer"}},
    {"a negative slice",
     [](A a) { sum(a, [](GroupSum& group) { group.slice = std::chrono::milliseconds(-1); }); },
     {"slice: got -1 ms", "expected 0 ms to 2^40 ms"}},
    {"words of unknown statistics",
     [](A) { (void)forward_words(static_cast<Statistics>(9), DType::kFloat32, 3); },
     {"statistics: got number 9", "reproducible or welford"}},
    {"identity of unknown statistics",
     [](A) { (void)layer_identity(1, {}, static_cast<Statistics>(9), false); },
     {"statistics: got number 9", "reproducible or welford"}},
    {"identity of an unknown activation",
     [](A) { (void)layer_identity(1, {static_cast<ActivationKind>(17)}, {}, false); },
     {"activation: got number 17"}},
    {"workspace of an unknown dtype",
     [](A) { (void)workspace_words(kUnknown, 3); },
     {"dtype: got dtype number 9"}},
    {"workspace of negative channels",
     [](A) { (void)workspace_words(DType::kFloat32, -3); },
     {"channels: got -3", "expected 0 to 2^31"}},
    {"eps of evaluation",
     [](A a) {
       evaluation_statistics(a.running_mean, a.running_var, a.mean.data(), nullptr, a.rstd.data(),
                             kNan, a.executor);
     },
     {"eps: got nan"}},
    {"evaluation without statistics",
     [](A a) {
       evaluation_statistics({}, {}, a.mean.data(), nullptr, a.rstd.data(), 1e-5, a.executor);
     },
     {"running_mean: got 0 axes", "expected 1"}},
    {"evaluation with a variance of other channels",
     [](A a) {
       a.running_var.sizes = {2};
       evaluation_statistics(a.running_mean, a.running_var, a.mean.data(), nullptr, a.rstd.data(),
                             1e-5, a.executor);
     },
     {"running_var: got shape (2)", "expected (3)"}},
    {"a device of what is recovered",
     [](A a) {
       a.y.device = static_cast<Device>(7);
       recover_input({a.y, a.mean.data(), a.rstd.data(), {}, {}, a.dx, a.bits.data(), 0.5},
                     a.executor);
     },
     {"y: got device number 7", "expected CPU or CUDA"}},
    {"a device of the mask",
     [](A a) { a.mask.device = static_cast<Device>(7), a.forward(); },
     {"mask: got device number 7", "expected CPU or CUDA"}},
    {"a device of the weight",
     [](A a) { a.weight.device = static_cast<Device>(7), a.forward(); },
     {"weight: got device number 7", "expected CPU or CUDA"}},
    {"batches before",
     [](A) { (void)cumulative_factor(-1); },
     {"batches: got -1", "expected a number of at least 0"}},
    {"batches that are no number",
     [](A) { (void)cumulative_factor(kNan); },
     {"batches: got nan", "expected a number of at least 0"}},
    {"a count of the operator's statistics",
     [](A a) { a.statistics.count = -8, a.op_backward(); },
     {"statistics.count: got -8", "expected 0 to 2^36"}},
    {"an executor without threads",
     [](A a) {
       Threadless none(0);
       forward_begin(forward_step(a), a.message.data(), none);
     },
     {"executor.concurrency: got 0", "expected at least 1"}},
    {"an executor of fewer threads than none",
     [](A a) {
       Threadless none(kLeast);
       a.layer.evaluate({.x = a.x, .y = a.y}, none);
     },
     {"executor.concurrency: got -2147483648", "expected at least 1"}},
    {"channels that were forgotten",
     [](A a) { BatchNorm layer({.eps = a.options.eps}); },
     {"channels: got none", "expected 0 to 2^31"}},
};

TEST(Numbers, OfOtherFunctionsAreRefusedExact) { expect_refused(kCases); }

}  // namespace
}  // namespace syncbn::testing
