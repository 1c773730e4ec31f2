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

/// Base of every exception that the library throws. After an exception no output was written that a
/// caller may rely on, and running statistics are unchanged.
class SYNCBN_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text, std::vector<int> ranks = {})
      : std::runtime_error(text),
        details_(std::make_shared<const Details>(Details{text, {}, std::move(ranks)})) {}
  Error(const Error&) noexcept = default;
  Error& operator=(const Error&) noexcept = default;

  const char* what() const noexcept override { return details_->text.c_str(); }

  /// The ranks that did not come, have left, or made another call than rank 0; empty where the
  /// error is about this rank alone or nobody knows.
  const std::vector<int>& ranks() const noexcept { return details_->ranks; }

  /// The name of the layer that was called; empty outside layers.
  const std::string& layer() const noexcept { return details_->layer; }

  /// Makes the text "call: text" and sets the layer, unless it is set.
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

/// An argument is outside what is allowed; the text names the argument, what was given and what is
/// allowed.
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

/// A rank left the group (it failed or was destroyed) while others wait for it.
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
