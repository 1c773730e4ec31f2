// SPDX-License-Identifier: Apache-2.0
#pragma once

#if __cplusplus <= 201703L
#error "syncbn's C++ headers need C++20 (-std=c++20); syncbn/c_api.h does not"
#include "syncbn stops here"  // does not exist: a compiler would go on, and give a hundred errors
#endif

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/export.h"

namespace syncbn {

/// What went wrong, as a value: the class of an Error, for code that compares kinds. The numbers
/// are those of syncbn_status in syncbn/c_api.h.
enum class ErrorKind : std::int32_t {
  kOther = 1,            ///< an Error of no class of its own
  kInvalidArgument = 2,  ///< InvalidArgument
  kDivergence = 3,       ///< DivergenceError
  kTimeout = 4,          ///< ExchangeTimeout
  kPeerLost = 5,         ///< PeerLost
  kUnavailable = 6,      ///< Unavailable
};

/// The base of every exception that the library defines. After an exception running
/// statistics are unchanged. Outputs are unchanged, too, after InvalidArgument and DivergenceError
/// of a layer; otherwise the caller must not rely on any output.
class SYNCBN_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kOther, text, std::move(ranks)) {}
  Error(const Error&) noexcept = default;
  Error& operator=(const Error&) noexcept = default;

  const char* what() const noexcept override { return details_->text.c_str(); }

  /// Returns the kind. A copy of type Error keeps the kind of the exception that it was copied
  /// from.
  ErrorKind kind() const noexcept { return details_->kind; }

  /// Returns the ranks that did not come, have left, or made another call than rank 0. The result
  /// is empty if the error concerns only this rank, or if the ranks are not known.
  const std::vector<int>& ranks() const noexcept { return details_->ranks; }

  /// Returns the name of the layer whose call failed. It is empty if the call was not a layer's.
  const std::string& layer() const noexcept { return details_->layer; }

  /// Sets the layer and puts "call: " before the text. Does nothing if the layer is already set.
  void set_layer(const std::string& layer, const std::string& call) {
    if (details_->layer.empty()) {
      details_ = std::make_shared<const Details>(
          Details{details_->kind, call + ": " + details_->text, layer, details_->ranks});
    }
  }

 protected:
  Error(ErrorKind kind, const std::string& text, std::vector<int> ranks)
      : std::runtime_error(text),
        details_(std::make_shared<const Details>(Details{kind, text, {}, std::move(ranks)})) {}

 private:
  struct Details {
    ErrorKind kind;
    std::string text;
    std::string layer;
    std::vector<int> ranks;
  };
  std::shared_ptr<const Details> details_;  // copies of an exception must not throw
};

/// An argument is not allowed. The text names the argument, the given value and the allowed values.
class SYNCBN_API InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kInvalidArgument, text, std::move(ranks)) {}
};

/// The ranks of one exchange did not make the same call (layer, order, channels, dtype, options).
class SYNCBN_API DivergenceError : public Error {
 public:
  explicit DivergenceError(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kDivergence, text, std::move(ranks)) {}
};

/// A rank did not arrive at an exchange within the communicator's time limit.
class SYNCBN_API ExchangeTimeout : public Error {
 public:
  explicit ExchangeTimeout(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kTimeout, text, std::move(ranks)) {}
};

/// A rank refused its call, or left the group because it failed or was destroyed.
class SYNCBN_API PeerLost : public Error {
 public:
  explicit PeerLost(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kPeerLost, text, std::move(ranks)) {}
};

/// The requested device or engine is not part of this build.
class SYNCBN_API Unavailable : public Error {
 public:
  explicit Unavailable(const std::string& text, std::vector<int> ranks = {})
      : Error(ErrorKind::kUnavailable, text, std::move(ranks)) {}
};

}  // namespace syncbn
