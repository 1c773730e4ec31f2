// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/passes.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "statistics/dtype.hpp"
#include "statistics/header.hpp"
#include "step/passes.hpp"
#include "support.hpp"
#include "syncbn/executor.hpp"

// Finalize of messages that no tensor gives: sums over many ranks, carries through all digits,
// squares that are too small. A warp's digits against the CPU's, on every level.
namespace syncbn {
namespace {

constexpr std::int64_t kChannels = 37;
constexpr std::int64_t kRadix = std::int64_t{1} << 52;

/// What the last digit of a sum can be, of 2^36 elements as large as its type has them, on all
/// ranks.
std::int64_t most_of_last(DType dtype, bool first, int ranks) {
  const bool half = dtype == DType::kFloat16;
  const int bits = first ? (half ? 24 : 52) : half ? 12 : dtype == DType::kFloat64 ? 52 : 18;
  return ((std::int64_t{1} << bits) - 1) >> (ranks > 7 ? 11 : 0);
}

/// One rank's digits: all but the last in [0, 2^52), that one signed.
void append_digits(Random& random, const SumFormat& format, std::int64_t most, bool negative,
                   Words& out) {
  // The last one makes a number that is a little above the middle of two, where the highest is 1.
  const Words likely = {0, 0, 1, 1, kRadix - 1, kRadix - 1, kRadix / 2, kRadix / 2 + (1LL << 40)};
  const auto used = random.between(0, format.digits);  // of those digits, from the lowest
  for (int i = 0; i < format.digits; ++i) {
    const bool top = i == format.digits - 1;
    const std::int64_t digit =
        random.one_in(2) ? random.pick(likely) : random.between(0, kRadix - 1);
    const std::int64_t beyond = negative ? (top ? -1 : kRadix - 1) : 0;
    const std::int64_t last = negative ? -(digit & most) : digit & most;
    out.push_back(i >= used ? beyond : top ? last : digit);
  }
}

/// The message of all ranks. signed_second: as in backward.
Words merged(Random& random, DType dtype, int ranks, std::int64_t count, bool signed_second) {
  const Format& format = format_of(dtype);
  Words out(size(kHeaderWords));
  write_header(out.data(), count, 77, dtype_flag(dtype));
  for (std::int64_t c = 0; c < kChannels; ++c) {
    append_digits(random, format.first, most_of_last(dtype, true, ranks), random.one_in(2), out);
    append_digits(random, format.second, most_of_last(dtype, false, ranks),
                  signed_second && random.one_in(2), out);
    out.push_back(random.one_in(8) ? kFirstNan : random.one_in(8) ? kSecondNonFinite : 0);
  }
  for (std::int64_t& word : out) {
    word *= ranks;
  }
  for (std::int64_t c = 0; c < kChannels; ++c) {  // ranks differ
    std::int64_t* const words = out.data() + kHeaderWords + c * format.words();
    words[random.between(0, format.first.digits - 1)] += random.between(-ranks, ranks);
  }
  return out;
}

TEST(CudaFinalize, MergedMessagesOfAnyDigitsExact) {
  Random random(9);
  const std::vector<std::string> levels = testing::available_levels();
  for (int round = 0; round < 160 && !HasFailure(); ++round) {
    const testing::LevelScope level(random.pick(levels));
    const DType dtype = testing::kDtypes[round % 4];
    const int ranks = round % 3 == 0     ? 1
                      : random.one_in(4) ? 2047  // fill the words
                                         : static_cast<int>(random.between(2, 7));
    const std::int64_t count = random.one_in(3) ? 1 : random.between(1, kMaxCount / ranks);
    SCOPED_TRACE("round " + std::to_string(round) + ", " + name(dtype) + ", " +
                 cpu_instruction_set());
    Words message = merged(random, dtype, ranks, count, false);
    const MessageInfo info = read_header(message.data(), ranks);
    ASSERT_EQ(info.count, count * ranks);

    Doubles mean(size(kChannels)), var(mean), rstd(mean), expected_mean(mean), expected_var(mean),
        expected_rstd(mean);
    finalize_moments(info, message.data() + kHeaderWords, expected_mean.data(), expected_var.data(),
                     expected_rstd.data(), kChannels, 1e-5, serial_executor());
    emulation::settings() = {.seed = random.bits(), .multiprocessors = 1};
    Words words(kInfoWords);
    cuda::finalize_moments(message.data(), dtype, ranks, mean.data(), var.data(), rstd.data(),
                           words.data(), kChannels, 1e-5, {}, {});
    EXPECT_EQ(words[0], info.count);
    EXPECT_TRUE(same_bits(mean, expected_mean)) << "mean";
    EXPECT_TRUE(same_bits(var, expected_var)) << "var";
    EXPECT_TRUE(same_bits(rstd, expected_rstd)) << "rstd";

    message = merged(random, dtype, ranks, count, true);
    Doubles coefficients(size(3 * kChannels)), expected(coefficients);
    Tensor dweight(DType::kFloat64, {kChannels}), dbias(dweight), expected_dweight(dweight),
        expected_dbias(dweight);
    finalize_gradients(info, message.data() + kHeaderWords,
                       {expected_mean.data(),
                        expected_rstd.data(),
                        {},
                        expected.data(),
                        expected_dweight.view(),
                        expected_dbias.view(),
                        kChannels},
                       info.count, serial_executor());
    cuda::finalize_gradients(message.data(), dtype, ranks, nullptr, words.data(),
                             {expected_mean.data(),
                              expected_rstd.data(),
                              {},
                              coefficients.data(),
                              on_cuda(dweight.view()),
                              on_cuda(dbias.view()),
                              kChannels},
                             {});
    EXPECT_TRUE(same_bits(coefficients, expected)) << "coefficients";
    EXPECT_TRUE(same_bits(dweight.values(), expected_dweight.values())) << "dweight";
    EXPECT_TRUE(same_bits(dbias.values(), expected_dbias.values())) << "dbias";
  }
  emulation::settings() = {};
}

}  // namespace
}  // namespace syncbn
