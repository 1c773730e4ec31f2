// SPDX-License-Identifier: Apache-2.0
#include "layer/agreement.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/rank_texts.hpp"
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

std::string presence_text(std::int64_t word) { return word == 0 ? "absent" : "given"; }

struct Field {
  const char* name;
  std::string (*text)(std::int64_t word);
};

constexpr std::array<Field, 13> kFields = {{
    {"layer", number_text},
    {"call", number_text},
    {"direction", direction_text},
    {"channels", number_text},
    {"dtype", dtype_text},
    {"eps", real_text},
    {"activation", activation_text},
    {"negative slope", real_text},
    {"statistics", statistics_text},
    {"residual", presence_text},
    {"weight", presence_text},
    {"bias", presence_text},
    {"forward's fingerprint", number_text},
}};
constexpr std::size_t kLayerField = 0;
constexpr std::size_t kDtypeField = 4;
constexpr std::size_t kForwardField = 12;
/// The layer's name follows the fields; of a longer one its end, which differs sooner.
constexpr std::size_t kNameBytes = 128;
constexpr std::size_t kWords = kFields.size() + kNameBytes / sizeof(std::int64_t);

void write_words(const AgreedCall& call, std::int64_t* to) {
  const BatchNorm::Options& options = *call.options;
  const Activation& activation = options.activation;
  const bool scaled = traits_of(activation.kind).scaled;
  const std::array<std::int64_t, kFields.size()> fields = {
      static_cast<std::int64_t>(call.layer),
      static_cast<std::int64_t>(call.call),
      static_cast<std::int64_t>(call.direction),
      call.channels,
      call.elements ? static_cast<std::int64_t>(call.dtype) : -1,
      static_cast<std::int64_t>(option_bits(options.eps)),
      static_cast<std::int64_t>(activation.kind),
      static_cast<std::int64_t>(option_bits(scaled ? activation.negative_slope : 0.0)),
      static_cast<std::int64_t>(options.statistics),
      std::int64_t{call.residual},
      std::int64_t{call.weight},
      std::int64_t{call.bias},
      std::int64_t{call.forward}};
  std::copy(fields.begin(), fields.end(), to);
  const std::size_t length = std::min(call.name.size(), kNameBytes);
  std::memcpy(to + fields.size(), call.name.data() + (call.name.size() - length), length);
}

/// What the ranks do, kWords words each.
class Ranks {
 public:
  explicit Ranks(std::vector<std::int64_t> words) : words_(std::move(words)) {}

  /// "eps: 1e-05 on rank 0, 1e-06 on ranks 1, 2"; empty if all ranks have one value. Notes the
  /// ranks that differ from the first one.
  std::string difference(std::size_t field) {
    std::vector<std::vector<int>> groups;  // ranks of one value
    for (std::size_t rank = 0; rank * kWords < words_.size(); ++rank) {
      if (field == kDtypeField && word(rank, field) < 0) {  // without samples any dtype fits
        continue;
      }
      const auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
        return word(static_cast<std::size_t>(group.front()), field) == word(rank, field);
      });
      const auto number = static_cast<int>(rank);
      if (found == groups.end()) {
        groups.push_back({number});
      } else {
        found->push_back(number);
      }
    }
    std::string all;
    for (std::size_t i = 0; i < groups.size() && groups.size() > 1; ++i) {
      all += i == 0 ? std::string(kFields[field].name) + ": " : ", ";
      all += text(static_cast<std::size_t>(groups[i].front()), field);
      all += " on " + rank_list(groups[i]);
      if (i > 0) {
        odd_.insert(groups[i].begin(), groups[i].end());
      }
    }
    return all;
  }

  std::vector<int> odd() const { return {odd_.begin(), odd_.end()}; }

 private:
  std::int64_t word(std::size_t rank, std::size_t field) const {
    return words_[rank * kWords + field];
  }
  std::string text(std::size_t rank, std::size_t field) const {
    const std::int64_t* of_rank = words_.data() + rank * kWords;
    if (field != kLayerField) {
      return kFields[field].text(of_rank[field]);
    }
    const auto* name = reinterpret_cast<const char*>(of_rank + kFields.size());
    return {name, strnlen(name, kNameBytes)};
  }

  std::vector<std::int64_t> words_;
  std::set<int> odd_;
};

}  // namespace

std::uint64_t layer_identity(std::uint64_t layer, const Activation& activation,
                             Statistics statistics, bool residual, bool weight, bool bias) {
  check_statistics(statistics);
  std::uint64_t state = mix(layer, static_cast<std::uint64_t>(activation.kind));
  if (traits_of(activation.kind).scaled) {
    state = mix(state, option_bits(activation.negative_slope));
  }
  state = mix(state, static_cast<std::uint64_t>(statistics));
  return mix(state,
             std::uint64_t{residual} | std::uint64_t{weight} << 1 | std::uint64_t{bias} << 2);
}

namespace {

/// What all ranks do, exchanged; empty if nothing differs.
std::optional<DivergenceError> disagreement(const AgreedCall& own, Communicator& communicator) {
  // Each rank's words in a place of their own: every communicator has a sum.
  const auto ranks_of_group = static_cast<std::size_t>(own.place.ranks);
  std::vector<std::int64_t> words(kWords * ranks_of_group);
  write_words(own, words.data() + kWords * static_cast<std::size_t>(own.place.rank));
  communicator.all_reduce_sum(words);
  Ranks ranks(std::move(words));
  std::string text =
      rank_of(own.place.rank, ranks_of_group) + "the ranks did not make the same call";
  const char* separator = ": ";
  for (std::size_t field = 0; field < kFields.size(); ++field) {
    if (field == kForwardField && !ranks.odd().empty()) {  // follows from the others
      continue;
    }
    const std::string differs = ranks.difference(field);
    if (!differs.empty()) {
      text += separator + differs;
      separator = "; ";
    }
  }
  return ranks.odd().empty() ? std::nullopt : std::optional(DivergenceError(text, ranks.odd()));
}

}  // namespace

void check_agreement(const MessageInfo& info, const AgreedCall& own, Communicator& communicator) {
  if (info.agree || info.any_rejected) {
    check_header(info);
    return;
  }
  if (const auto error = disagreement(own, communicator); error.has_value()) {
    throw *error;
  }
  throw DivergenceError("the ranks did not make the same call");
}

void explain_divergence(const DivergenceError& error, const AgreedCall& own,
                        Communicator& communicator) {
  std::optional<DivergenceError> named;
  try {
    named = disagreement(own, communicator);
  } catch (const Error&) {
    throw error;  // not all ranks came here
  }
  throw named.value_or(error);
}

}  // namespace syncbn
