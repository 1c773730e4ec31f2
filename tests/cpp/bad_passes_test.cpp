// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bad_input.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "syncbn/shared_memory.hpp"
#include "syncbn/step.hpp"

// What a caller of the passes can get wrong, and who makes groups and executors.
namespace syncbn::testing {
namespace {

using std::chrono::milliseconds;

void shares(A a, const std::int64_t* words, DType dtype) {
  affine_gradient_shares(words, dtype,
                         {.mean = a.mean.data(),
                          .rstd = a.rstd.data(),
                          .dweight = a.dweight,
                          .dbias = a.dbias,
                          .channels = 3},
                         a.executor);
}

const std::vector<Case> kPassCases = {
    {"no message",
     [](A a) { local_moments(a.x, a.mask, nullptr, 0, a.executor); },
     {"message: got a null pointer", "expected 65 entries"}},
    {"words of nobody",
     [](A a) { a.finalize(nullptr, a.var.data()); },
     {"words: got a null pointer", "expected 57 entries"}},
    {"no var",
     [](A a) { a.finalize(a.message.data() + 4, nullptr); },
     {"var: got a null pointer", "expected 3 entries"}},
    {"negative channels",
     [](A a) { a.finalize(a.message.data() + 4, a.var.data(), -1); },
     {"channels: got -1", "expected 0 to 2^31"}},
    {"header of an unknown dtype",
     [](A a) { a.info.dtype = kUnknown, a.finalize(a.message.data() + 4, a.var.data()); },
     {"dtype: got dtype number 9", "expected float16"}},
    {"normalize without mean",
     [](A a) {
       normalize({a.x, a.mask, nullptr, a.rstd.data(), a.weight, a.bias, {}, a.y}, a.executor);
     },
     {"mean: got a null pointer", "expected 3 entries"}},
    {"update without var",
     [](A a) {
       update_running_statistics(a.running_mean, a.running_var, a.mean.data(), nullptr, 3, 8, 0.5);
     },
     {"var: got a null pointer", "expected 3 entries"}},
    {"update of a negative count",
     [](A a) {
       update_running_statistics(a.running_mean, a.running_var, a.mean.data(), a.var.data(), 3, -1,
                                 0.5);
     },
     {"count: got -1", "expected 0 to 2^36"}},
    {"update in one place",
     [](A a) {
       flatten(a.running_var, 0);
       update_running_statistics(a.running_mean, a.running_var, a.mean.data(), a.var.data(), 3, 8,
                                 0.5);
     },
     {"running_var: got stride 0", "expected memory of its own for each entry"}},
    {"gradients without rstd",
     [](A a) {
       const ActivationGradient through{{ActivationKind::kRelu}, a.weight, a.bias};
       local_gradients({a.dy, a.x, a.mask, a.mean.data(), nullptr, through}, a.message.data(), 0,
                       a.executor);
     },
     {"rstd: got a null pointer", "expected 3 entries"}},
    {"u in one place",
     [](A a) {
       flatten(a.dx, 2);
       local_gradients({a.dy, a.x, a.mask, a.mean.data(), a.rstd.data(), {}, a.dx},
                       a.message.data(), 0, a.executor);
     },
     {"u: got stride 0 of axis 2", "expected memory of its own for each entry"}},
    {"no coefficients",
     [](A a) {
       finalize_gradients(a.info, a.message.data() + 4,
                          {a.mean.data(), a.rstd.data(), a.weight, nullptr, a.dweight, a.dbias, 3},
                          8, a.executor);
     },
     {"coefficients: got a null pointer", "expected 9 entries"}},
    {"shares of an unknown dtype",
     [](A a) { shares(a, a.message.data() + 4, kUnknown); },
     {"dtype: got dtype number 9", "expected float16"}},
    {"shares of no words",
     [](A a) { shares(a, nullptr, DType::kFloat32); },
     {"words: got a null pointer", "expected 57 entries"}},
    {"shares without the message that was sent",
     [](A a) {
       backward_finish(
           {.pass = {.dy = a.dy, .x = a.x, .mean = a.mean.data(), .dweight = a.dweight}}, nullptr,
           {a.message.data(), a.message.data() + kHeaderWords, DType::kFloat32, 1}, a.executor);
     },
     {"own: got null", "expected the message that this rank sent, which has its share"}},
    {"forward without info",
     [](A a) {
       const ForwardStep step{.pass = {.x = a.x, .mean = a.mean.data(), .rstd = a.rstd.data()}};
       forward_finish(step, {a.message.data(), a.message.data() + kHeaderWords}, a.executor);
     },
     {"info: got a null pointer", "expected 2 entries"}},
    {"update without info",
     [](A a) { forward_update({.pass = {.x = a.x}}, a.executor); },
     {"info: got a null pointer", "expected 2 entries"}},
    {"forward at once without info",
     [](A a) {
       GroupSum alone;
       forward_at_once({.pass = {.x = a.x, .y = a.y}}, alone, a.executor);
     },
     {"info: got a null pointer", "expected 2 entries"}},
    {"input's gradient without coefficients",
     [](A a) {
       input_gradient({a.dy, a.x, a.mask, a.mean.data(), a.rstd.data(), nullptr, {}, a.dx},
                      a.executor);
     },
     {"coefficients: got a null pointer", "expected 9 entries"}},
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
    {"evaluation's gradient without rstd",
     [](A a) {
       evaluation_input_gradient_on_cpu(a.dy, a.mask, nullptr, a.weight, a.dx, a.executor);
     },
     {"rstd: got a null pointer", "expected 3 entries"}},
    {"header of nothing",
     [](A) { read_header(nullptr, 1); },
     {"merged: got a null pointer", "expected 8 entries"}},
    {"header of no ranks",
     [](A a) { read_header(a.message.data(), 0); },
     {"ranks: got 0", "expected 1 to 2048"}},
    {"words of an unknown dtype",
     [](A) { words_per_channel(kUnknown); },
     {"dtype: got dtype number 9", "expected float16"}},
    {"words of negative channels",
     [](A) { message_words(DType::kFloat32, -1); },
     {"channels: got -1", "expected 0 to 2^31"}},
    {"words that wrap around",
     [](A) { message_words(DType::kFloat16, kWrapping); },
     {"channels: got 3074457345618258603", "expected 0 to 2^31"}},
    {"welford words that overflow",
     [](A) { welford_words(DType::kFloat64, 1LL << 62); },
     {"channels: got 4611686018427387904", "expected 0 to 2^31"}},
    {"welford without a message",
     [](A a) { local_welford(a.x, a.mask, nullptr, 0, a.executor); },
     {"message: got a null pointer", "expected 12 entries"}},
    {"welford without records",
     [](A a) {
       merge_welford(a.info, nullptr, a.mean.data(), a.var.data(), a.rstd.data(), 3, 1, 4, 1e-5);
     },
     {"records: got a null pointer", "expected "}},
    {"welford of too many ranks",
     [](A a) {
       merge_welford(a.info, a.message.data(), a.mean.data(), a.var.data(), a.rstd.data(), 3, 2049,
                     4, 1e-5);
     },
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

TEST(BadInput, OfAPassIsRefusedExact) { expect_refused(kPassCases); }

TEST(BadInput, OfAGroupIsRefusedExact) { expect_refused(kGroupCases); }

}  // namespace
}  // namespace syncbn::testing
