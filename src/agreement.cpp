#include "agreement.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <utility>
#include <vector>

#include "statistics/activation.hpp"
#include "statistics/header.hpp"
#include "statistics/scalar.hpp"
#include "syncbn/error.hpp"

namespace syncbn {
namespace {

std::string number_text(std::int64_t word) {
  return std::to_string(static_cast<std::uint64_t>(word));
}

std::string real_text(std::int64_t word) {
  std::array<char, 32> text{};  // the shortest text of a double has 24 characters
  char* const end =
      std::to_chars(text.data(), text.data() + text.size(), bit_copy<double>(word)).ptr;
  return {text.data(), end};
}

std::string direction_text(std::int64_t word) {
  return word == static_cast<std::int64_t>(Direction::kForward) ? "forward" : "backward";
}

// A rank with another version of the library may say anything.
std::string dtype_text(std::int64_t word) {
  return word < 0 ? "any" : word < kDtypeCount ? name(static_cast<DType>(word)) : "unknown";
}

std::string activation_text(std::int64_t word) {
  const bool known = word >= 0 && word < kActivationCount;
  return known ? traits_of(static_cast<ActivationKind>(word)).name : "unknown";
}

std::string statistics_text(std::int64_t word) {
  return word == static_cast<std::int64_t>(Statistics::kWelford) ? "welford" : "reproducible";
}

std::string residual_text(std::int64_t word) { return word == 0 ? "absent" : "given"; }

struct Field {
  const char* name;
  std::string (*text)(std::int64_t word);
};

constexpr std::array<Field, 11> kFields = {{
    {"layer", number_text},
    {"call", number_text},
    {"direction", direction_text},
    {"channels", number_text},
    {"dtype", dtype_text},
    {"eps", real_text},
    {"activation", activation_text},
    {"negative slope", real_text},
    {"statistics", statistics_text},
    {"residual", residual_text},
    {"forward's fingerprint", number_text},
}};
constexpr std::size_t kDtypeField = 4;

using Words = std::array<std::int64_t, kFields.size()>;

Words words_of(const AgreedCall& call) {
  const BatchNormOptions none;
  const BatchNormOptions& options = call.options == nullptr ? none : *call.options;
  const Activation& activation = options.activation;
  const bool scaled = traits_of(activation.kind).scaled;
  return {static_cast<std::int64_t>(call.layer),
          static_cast<std::int64_t>(call.call),
          static_cast<std::int64_t>(call.direction),
          call.channels,
          call.elements ? static_cast<std::int64_t>(call.dtype) : -1,
          bit_copy<std::int64_t>(options.eps + 0.0),
          static_cast<std::int64_t>(activation.kind),
          bit_copy<std::int64_t>(scaled ? activation.negative_slope + 0.0 : 0.0),
          static_cast<std::int64_t>(options.statistics),
          std::int64_t{call.residual},
          std::int64_t{call.forward}};
}

/// "1e-05 on rank 0, 1e-06 on rank 1"; empty if all ranks have one value.
std::string difference(const Field& field, std::size_t at, const std::vector<std::int64_t>& words,
                       bool any_fits) {
  std::vector<std::pair<std::int64_t, std::string>> ranks;  // in the order of their first rank
  for (std::size_t i = at, rank = 0; i < words.size(); i += kFields.size(), ++rank) {
    if (any_fits && words[i] < 0) {
      continue;
    }
    const auto same = [&](const auto& one) { return one.first == words[i]; };
    const auto found = std::find_if(ranks.begin(), ranks.end(), same);
    if (found == ranks.end()) {
      ranks.emplace_back(words[i], std::to_string(rank));
    } else {
      found->second += ", " + std::to_string(rank);
    }
  }
  if (ranks.size() < 2) {
    return {};
  }
  std::string all = std::string(field.name) + ": ";
  const char* separator = "";
  for (const auto& [word, of_word] : ranks) {
    const bool several = of_word.find(',') != std::string::npos;
    all += separator + field.text(word) + (several ? " on ranks " : " on rank ") + of_word;
    separator = ", ";
  }
  return all;
}

}  // namespace

std::uint64_t layer_identity(std::uint64_t layer, const Activation& activation,
                             Statistics statistics, bool residual) {
  std::uint64_t state = mix(layer, static_cast<std::uint64_t>(activation.kind));
  if (traits_of(activation.kind).scaled) {
    state = mix(state, bit_copy<std::uint64_t>(activation.negative_slope + 0.0));  // -0 is 0
  }
  state = mix(state, static_cast<std::uint64_t>(statistics));
  return mix(state, std::uint64_t{residual});
}

std::uint32_t AgreedCall::fingerprint() const {
  if (direction == Direction::kBackward) {
    return backward_fingerprint(forward);
  }
  return syncbn::fingerprint(
      layer_identity(layer, options->activation, options->statistics, residual), call, direction,
      channels, options->eps);
}

void check_agreement(const MessageInfo& info, const AgreedCall& own, Communicator& communicator) {
  if (info.agree || info.any_rejected) {
    check_header(info);
    return;
  }
  // Each rank's words in a place of their own: every communicator has a sum.
  std::vector<std::int64_t> words(kFields.size() * static_cast<std::size_t>(communicator.size()));
  const Words mine = words_of(own);
  std::copy(mine.begin(), mine.end(),
            words.begin() + static_cast<std::ptrdiff_t>(kFields.size()) * communicator.rank());
  communicator.all_reduce_sum(words);
  std::string text = "rank " + std::to_string(communicator.rank()) + " of " +
                     std::to_string(communicator.size()) + ": the ranks did not make the same call";
  const char* separator = ": ";
  for (std::size_t i = 0; i < kFields.size(); ++i) {
    const std::string differs = difference(kFields[i], i, words, i == kDtypeField);
    if (!differs.empty()) {
      text += separator + differs;
      separator = "; ";
    }
  }
  throw DivergenceError(text);
}

}  // namespace syncbn
