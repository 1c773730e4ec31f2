#include "statistics/header.hpp"

#include <string>

#include "checks.hpp"
#include "statistics/format.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/error.hpp"
#include "syncbn/passes.hpp"

namespace syncbn {
namespace {

constexpr std::uint64_t kContractVersion = 1;
constexpr int kFingerprintBits = 20;

/// SplitMix64's finalizer (Steele, Lea and Flood 2014) over a running value.
std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state += value + 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

std::uint32_t top_bits(std::uint64_t state) {
  return static_cast<std::uint32_t>(state >> (64 - kFingerprintBits));
}

}  // namespace

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

int words_per_channel(DType dtype) { return format_of(dtype).words(); }

std::int64_t message_words(DType dtype, std::int64_t channels) {
  return kHeaderWords + channels * words_per_channel(dtype);
}

std::uint32_t fingerprint(std::uint64_t layer, std::uint64_t call, Direction direction,
                          std::int64_t channels, double eps) {
  std::uint64_t state = kContractVersion;
  for (const std::uint64_t value :
       {layer, call, static_cast<std::uint64_t>(direction), static_cast<std::uint64_t>(channels),
        bit_copy<std::uint64_t>(eps)}) {
    state = mix(state, value);
  }
  return top_bits(state);
}

std::uint32_t backward_fingerprint(std::uint32_t forward) {
  return top_bits(
      mix(mix(kContractVersion, forward), static_cast<std::uint64_t>(Direction::kBackward)));
}

MessageInfo read_header(const std::int64_t* merged, int ranks) {
  check_ranks(ranks);
  MessageInfo info;
  info.count = merged[kHeaderCount];
  const std::int64_t sum = merged[kHeaderFingerprint];
  // Equality in Cauchy-Schwarz: all fingerprints are the same. Both sides are below 2^62.
  info.agree = ranks * merged[kHeaderSquare] == sum * sum;
  const std::int64_t flags = merged[kHeaderFlags];
  info.any_rejected = (flags & kCounterMask) != 0;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if ((flags & (dtype_flag(dtype) * kCounterMask)) == 0) {
      continue;
    }
    if (info.any_data) {
      info.agree = false;
    }
    info.any_data = true;
    info.dtype = dtype;
  }
  return info;
}

void check_header(const MessageInfo& info) {
  if (info.any_rejected) {
    throw DivergenceError("a rank of the group refused its input; that rank's error says why");
  }
  if (!info.agree) {
    throw DivergenceError(
        "the ranks of the group did not make the same call: layer, call number, direction, "
        "channels, "
        "eps and dtype must be equal on all of them");
  }
  if (info.count > kMaxCount) {
    throw InvalidArgument("x: got " + std::to_string(info.count) +
                          " elements per channel over all ranks, expected at most 2^36");
  }
}

void rejection_header(std::uint32_t fingerprint, std::int64_t* message) {
  write_header(message, 0, fingerprint, kRejected);
}

}  // namespace syncbn
