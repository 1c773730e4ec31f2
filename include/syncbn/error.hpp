// SPDX-License-Identifier: Apache-2.0
#pragma once

#if __cplusplus <= 201703L
#error "syncbn's C++ headers need C++20 (-std=c++20); syncbn/c_api.h does not"
#endif

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "syncbn/export.hpp"

namespace syncbn {

/// The base of every exception that the library defines. After an exception running
/// statistics are unchanged. Outputs are unchanged, too, after InvalidArgument and DivergenceError
/// of a layer; otherwise the caller must not rely on any output.
class SYNCBN_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, std::vector<int> ranks = {})
      : std::runtime_error(text),
        details_(std::make_shared<const Details>(Details{text, {}, std::move(ranks)})) {}
  Error(const Error&) noexcept = default;
  Error& operator=(const Error&) noexcept = default;

  const char* what() const noexcept override { return details_->text.c_str(); }

  /// Returns the ranks that did not come, have left, or made another call than rank 0. The result
  /// is empty if the error concerns only this rank, or if the ranks are not known.
  const std::vector<int>& ranks() const noexcept { return details_->ranks; }

  /// Returns the name of the layer whose call failed. It is empty if the call was not a layer's.
  const std::string& layer() const noexcept { return details_->layer; }

  /// Sets the layer and puts "call: " before the text. Does nothing if the layer is already set.
  void set_layer(const std::string& layer, const std::string& call) {
    if (details_->layer.empty()) {
      details_ = std::make_shared<const Details>(
          Details{call + ": " + details_->text, layer, details_->ranks});
    }
  }

 private:
  struct Details {
    std::string text;
    std::string layer;
    std::vector<int> ranks;
  };
  std::shared_ptr<const Details> details_;  // copies of an exception must not throw
};

/// An argument is not allowed. The text names the argument, the given value and the allowed values.
class SYNCBN_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The ranks of one exchange did not make the same call (layer, order, channels, dtype, options).
class SYNCBN_API DivergenceError : public Error {
 public:
  using Error::Error;
};

/// A rank did not arrive at an exchange within the communicator's time limit.
class SYNCBN_API ExchangeTimeout : public Error {
 public:
  using Error::Error;
};

/// A rank refused its call, or left the group because it failed or was destroyed.
class SYNCBN_API PeerLost : public Error {
 public:
  using Error::Error;
};

/// The requested device or engine is not part of this build.
class SYNCBN_API Unavailable : public Error {
 public:
  using Error::Error;
};

}  // namespace syncbn
