// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "small_step.hpp"
#include "support.hpp"
#include "syncbn/batch_norm.hpp"

// Memory of the caller's, and what a layer does that is refused when it is made.
namespace syncbn::testing {
namespace {

/// Memory that knows what is out.
struct Ledger {
  Allocator memory() {
    return {this,
            [](void* context, std::size_t bytes, Device device, void* stream) {
              EXPECT_TRUE(device == Device::kCpu && stream == nullptr);
              return static_cast<Ledger*>(context)->allocate(bytes);
            },
            [](void* context, void* memory, std::size_t bytes, Device device, void* stream) {
              EXPECT_TRUE(device == Device::kCpu && stream == nullptr);
              static_cast<Ledger*>(context)->release(memory, bytes);
            }};
  }
  void* allocate(std::size_t bytes) {
    ++calls;
    if (failure == kThrows) {
      throw 5;  // of no class
    }
    if (failure == kNull) {
      return nullptr;
    }
    void* memory = ::operator new(bytes, std::align_val_t{64});
    out[memory] = bytes;
    return memory;
  }
  void release(void* memory, std::size_t bytes) {
    ASSERT_EQ(out.count(memory), 1U);
    EXPECT_EQ(out[memory], bytes);
    out.erase(memory);
    ::operator delete(memory, std::align_val_t{64});
  }
  enum Failure { kNone, kNull, kThrows } failure = kNone;
  std::map<void*, std::size_t> out;
  int calls = 0;
};

TEST(Allocator, IsTakenOnceForAShapeAndGivenBack) {
  Ledger ledger;
  {
    BatchNorm layer({.channels = 3}, ledger.memory()), wide({.channels = 50}, ledger.memory());
    SmallStep step({2, 3, 4}), wider({2, 50});
    Saved saved(ledger.memory());
    EXPECT_EQ(ledger.calls, 0);
    for (int i = 0; i < 3; ++i) {
      step.forward(layer, saved);
      step.backward(layer, saved);
      EXPECT_EQ(ledger.calls, 1);
    }
    EXPECT_GE(ledger.out.begin()->second, 9 * sizeof(double));
    for (int i = 0; i < 3; ++i) {  // the smaller one fits in what the larger one has
      wider.forward(wide, saved);
      step.forward(layer, saved);
      EXPECT_EQ(ledger.calls, 2);
      EXPECT_EQ(ledger.out.size(), 1U);
    }
    Saved other = std::move(saved);
    EXPECT_EQ(other.count(), 8);
    EXPECT_EQ(ledger.out.size(), 1U);
  }
  EXPECT_TRUE(ledger.out.empty());
  EXPECT_EQ(ledger.calls, 2);
}

TEST(Allocator, ThatIsNotThereFailsTheCallAlone) {
  Ledger ledger;
  SmallStep step({2, 3, 4}), wider({2, 3, 4});
  BatchNorm layer({.channels = 3, .activation = {ActivationKind::kRelu}});
  Saved saved(ledger.memory());
  step.forward(layer, saved);
  const std::vector<double> y = wider.y.values();
  ledger.failure = Ledger::kNull;
  EXPECT_THROW(wider.forward(layer, saved, true), std::bad_alloc);  // it needs bits, too
  expect_empty(saved);
  ledger.failure = Ledger::kThrows;
  EXPECT_THROW(wider.forward(layer, saved, true), int);
  expect_empty(saved);
  EXPECT_TRUE(ledger.out.empty());
  EXPECT_TRUE(same_bits(wider.y.values(), y));
  ledger.failure = Ledger::kNone;
  wider.forward(layer, saved, true);
  wider.backward(layer, saved, true);
  EXPECT_EQ(saved.count(), 8);
}

TEST(Allocator, ThatIsNotThereIsToldToTheOtherRanks) {
  ThreadGroup group(2, std::chrono::seconds(20));
  Ledger ledger;
  ledger.failure = Ledger::kNull;
  const auto errors = run_ranks(2, [&](int r) {
    BatchNorm layer({.channels = 3, .name = "layer"}, group.rank(r));
    Saved saved(r == 1 ? ledger.memory() : Allocator());
    SmallStep({2, 3, 4}).forward(layer, saved);
  });
  EXPECT_THROW(std::rethrow_exception(errors[1]), std::bad_alloc);
  EXPECT_TRUE(contains(text_of<PeerLost>(errors[0]),
                       "rank 1 refused its call: layer, call 0, forward, 3 channels, float32: "));
}

TEST(Allocator, NeedsBothFunctionsOrNone) {
  Ledger ledger;
  Allocator takes = ledger.memory(), gives = takes;
  takes.release = nullptr;
  gives.allocate = nullptr;
  for (const Allocator& memory : {takes, gives}) {
    for (const std::string& text :
         {thrown_text<InvalidArgument>([&] { Saved{memory}; }),
          thrown_text<InvalidArgument>([&] { BatchNorm({.channels = 3}, memory); })}) {
      EXPECT_EQ(text, "allocator: got one of allocate and release, expected both or neither");
    }
  }
}

/// A constructor that refuses leaves the group; the others would wait for that rank's layer.
TEST(Layer, ThatIsRefusedIsToldToTheOtherRanks) {
  Ledger ledger;
  Allocator half = ledger.memory();
  half.release = nullptr;
  const struct {
    BatchNorm::Options options;
    Allocator memory;
    const char* text;
  } cases[] = {{{.channels = 3},
                {},
                "options.name: got none, expected this layer's own name, the same on all ranks "
                "(there are 3 ranks)"},
               {{.name = "layer"}, {}, "channels: got none, expected 0 to 2^31"},
               {{.channels = -3, .name = "layer"}, {}, "channels: got -3"},
               {{.channels = 3, .name = "layer", .eps = -1}, {}, "eps: got -1"},
               {{.channels = 3, .name = "layer", .momentum = 2}, {}, "momentum: got 2"},
               {{.channels = 3, .name = "layer"}, half, "allocator: got one"}};
  for (const auto& one : cases) {
    ThreadGroup group(3, std::chrono::seconds(20));
    const auto errors = run_ranks(3, [&](int r) {
      BatchNorm layer = r == 1 ? BatchNorm(one.options, group.rank(r), one.memory)
                               : BatchNorm({.channels = 3, .name = "layer"}, group.rank(r));
      Saved saved;
      SmallStep({2, 3, 4}).forward(layer, saved);
    });
    const bool named = !one.options.name.empty();
    const std::string text = (named ? "layer: " : "") + std::string(one.text);
    EXPECT_TRUE(text_of<InvalidArgument>(errors[1]).starts_with(text));
    EXPECT_EQ(error_of<InvalidArgument>(errors[1]).layer(), named ? "layer" : "");
    for (const std::size_t r : {0U, 2U}) {
      EXPECT_TRUE(contains(text_of<PeerLost>(errors[r]), "rank 1 refused its call: " + text));
      EXPECT_EQ(error_of<PeerLost>(errors[r]).ranks(), std::vector<int>{1});
      EXPECT_EQ(error_of<PeerLost>(errors[r]).layer(), "layer");
    }
  }
}

}  // namespace
}  // namespace syncbn::testing
