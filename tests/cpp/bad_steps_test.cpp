// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bad_input.hpp"
#include "statistics/header.hpp"
#include "syncbn/shared_memory.hpp"
#include "syncbn/step.hpp"

// What a caller of the doors can get wrong, besides numbers, and who makes groups and executors.
namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;

/// Of eight elements, on which all ranks agree.
constexpr std::int64_t kHeader[kHeaderWords] = {8};

template <class Change>
void begin(A a, const Change& change) {
  ForwardStep step = forward_step(a);
  change(step);
  forward_begin(step, nullptr, a.executor);
}
template <class Change>
void finish(A a, const Merged& merged, const Change& change) {
  ForwardStep step = forward_step(a);
  change(step);
  forward_finish(step, merged, a.executor);
}
template <class Change>
void update(A a, const Change& change) {
  ForwardStep step = forward_step(a);
  change(step);
  forward_update(step, a.executor);
}
template <class Change>
void begin_backward(A a, const Change& change) {
  BackwardStep step = backward_step(a);
  change(step);
  backward_begin(step, a.message.data(), nullptr, a.executor);
}
template <class Change>
void finish_backward(A a, const Merged& merged, const Change& change) {
  BackwardStep step = backward_step(a);
  change(step);
  backward_finish(step, a.message.data(), merged, a.executor);
}
void of_welford(ForwardStep& step) { step.statistics = Statistics::kWelford; }

const std::vector<Case> kDoorCases = {
    {"no message",
     [](A a) { begin(a, [](auto&) {}); },
     {"message: got a null pointer", "expected 65 entries"}},
    {"words of nobody",
     [](A a) { finish(a, {kHeader}, [](auto&) {}); },
     {"words: got a null pointer", "expected 57 entries"}},
    {"no var",
     [](A a) { finish(a, merged(a), [](auto& step) { step.pass.var = nullptr; }); },
     {"var: got a null pointer", "expected 3 entries"}},
    {"y of another shape, after statistics",
     [](A a) { finish(a, merged(a), [](auto& step) { step.pass.y.sizes = {2, 4, 3}; }); },
     {"y: got shape (2, 4, 3)", "expected the shape of x, (2, 3, 4)"}},
    {"normalize without mean",
     [](A a) { finish(a, {}, [](auto& step) { step.pass.mean = nullptr; }); },
     {"mean: got a null pointer", "expected 3 entries"}},
    {"forward without info",
     [](A a) { finish(a, merged(a), [](auto& step) { step.info = nullptr; }); },
     {"info: got a null pointer", "expected 2 entries"}},
    {"update without info",
     [](A a) { update(a, [](auto& step) { step.info = nullptr; }); },
     {"info: got a null pointer", "expected 2 entries"}},
    {"update without var",
     [](A a) { update(a, [](auto& step) { step.pass.var = nullptr; }); },
     {"var: got a null pointer", "expected 3 entries"}},
    {"update of a negative count",
     [](A a) {
       std::int64_t info[kInfoWords] = {-1, 0};
       update(a, [&](auto& step) { step.info = info; });
     },
     {"count: got -1", "expected 0 to 2^36"}},
    {"update in one place",
     [](A a) { update(a, [](auto& step) { flatten(step.running.var, 0); }); },
     {"running_var: got stride 0", "expected memory of its own for each entry"}},
    {"update of other channels",
     [](A a) { update(a, [](auto& step) { step.running.mean.sizes = {2}; }); },
     {"running_mean: got shape (2)", "expected (3)"}},
    {"forward at once without info",
     [](A a) {
       GroupSum alone;
       forward_at_once({.pass = {.x = a.x, .y = a.y}}, alone, a.executor);
     },
     {"info: got a null pointer", "expected 2 entries"}},
    {"gradients without rstd",
     [](A a) {
       begin_backward(a, [&](auto& step) {
         step.pass.through = {{ActivationKind::kRelu}, a.weight, a.bias};
         step.pass.rstd = nullptr;
       });
     },
     {"rstd: got a null pointer", "expected 3 entries"}},
    {"u in one place",
     [](A a) { begin_backward(a, [&](auto& step) { flatten(step.pass.u = a.dx, 2); }); },
     {"u: got stride 0 of axis 2", "expected memory of its own for each entry"}},
    {"no coefficients",
     [](A a) { finish_backward(a, merged(a), [](auto& step) { step.coefficients = nullptr; }); },
     {"coefficients: got a null pointer", "expected 9 entries"}},
    {"dx of another dtype, after gradients",
     [](A a) {
       finish_backward(a, merged(a), [](auto& step) { step.pass.dx.dtype = DType::kFloat16; });
     },
     {"dx: got float16", "expected the dtype of x, float32"}},
    {"shares without the message that was sent",
     [](A a) { backward_finish(backward_step(a), nullptr, merged(a), a.executor); },
     {"own: got null", "expected the message that this rank sent, which has its share"}},
    {"evaluation's gradient without rstd",
     [](A a) { finish_backward(a, {}, [](auto& step) { step.pass.rstd = nullptr; }); },
     {"rstd: got a null pointer", "expected 3 entries"}},
    {"recovery without a place for bits",
     [](A a) {
       recover_input({a.x, a.mean.data(), a.rstd.data(), a.weight, a.bias, a.dx, nullptr, 0.5},
                     a.executor);
     },
     {"activation_mask: got a null pointer", "expected "}},
    {"recovery with slope 0",
     [](A a) {
       recover_input({a.x, a.mean.data(), a.rstd.data(), a.weight, a.bias, a.dx, a.bits.data(), 0},
                     a.executor);
     },
     {"negative_slope: got 0", "expected a finite number other than 0"}},
    {"recovery in another order",
     [](A a) {
       a.dx.strides = {12, 1, 3};
       recover_input({a.x, a.mean.data(), a.rstd.data(), {}, {}, a.dx, a.bits.data(), 0.5},
                     a.executor);
     },
     {"x: got strides of another order than y's", "expected y's"}},
    {"header of nothing",
     [](A) { read_header(nullptr, 1); },
     {"merged: got a null pointer", "expected 8 entries"}},
    {"header of no ranks",
     [](A a) { read_header(a.message.data(), 0); },
     {"ranks: got 0", "expected 1 to 2048"}},
    {"words of an unknown dtype",
     [](A) { message_words(kUnknown, 3); },
     {"dtype: got dtype number 9", "expected float16"}},
    {"words of negative channels",
     [](A) { message_words(DType::kFloat32, -1); },
     {"channels: got -1", "expected 0 to 2^31"}},
    {"words that wrap around",
     [](A) { message_words(DType::kFloat16, kWrapping); },
     {"channels: got 3074457345618258603", "expected 0 to 2^31"}},
    {"welford words that overflow",
     [](A) { (void)forward_words(Statistics::kWelford, DType::kFloat64, 1LL << 62); },
     {"channels: got 4611686018427387904", "expected 0 to 2^31"}},
    {"welford without a message",
     [](A a) { begin(a, of_welford); },
     {"message: got a null pointer", "expected 12 entries"}},
    {"welford without records",
     [](A a) { finish(a, {kHeader}, of_welford); },
     {"records: got a null pointer", "expected 1 entries"}},
    {"welford of too many ranks",
     [](A a) { finish(a, {kHeader, kHeader, DType::kFloat32, 2049}, of_welford); },
     {"ranks: got 2049", "expected 1 to 2048"}},
};

const std::vector<Case> kGroupCases = {
    {"no time", [](A) { ThreadGroup(2, milliseconds(0)); }, {"timeout: got 0 ms", "1 ms to"}},
    {"time that overflows",
     [](A) { ThreadGroup(2, milliseconds::max()); },
     {"timeout: got 9223372036854775807 ms", "expected 1 ms to 2^40 ms"}},
    {"a rank beyond the group",
     [](A) { static_cast<void>(ThreadGroup(2).rank(2)); },
     {"rank: got 2", "expected 0 to 1"}},
    {"an offer to nobody",
     [](A) { SharedMemoryOffer(0, 0); },
     {"ranks: got 0", "expected 1 to 2048"}},
    {"shared memory without end",
     [](A) {
       SharedMemoryOffer offer(0, 1);
       const std::vector<std::byte> bytes(offer.bytes().begin(), offer.bytes().end());
       (void)SharedMemoryGroup::open(std::move(offer), bytes, milliseconds::max());
     },
     {"timeout: got 9223372036854775807 ms", "expected 1 ms to 2^40 ms"}},
    {"a pool without threads", [](A) { ThreadPool(0); }, {"threads: got 0", "at least 1"}},
};

TEST(BadInput, OfADoorIsRefusedExact) { expect_refused(kDoorCases); }

TEST(BadInput, OfAGroupIsRefusedExact) { expect_refused(kGroupCases); }

}  // namespace
}  // namespace syncbn::testing
