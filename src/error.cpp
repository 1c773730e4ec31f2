// SPDX-License-Identifier: Apache-2.0
#include "syncbn/error.hpp"

#include <utility>

namespace syncbn {

struct Error::Details {
  std::string text;
  std::string layer;
  std::vector<int> ranks;
};

Error::Error(const std::string& text, std::vector<int> ranks)
    : std::runtime_error(text),
      details_(std::make_shared<const Details>(Details{text, {}, std::move(ranks)})) {}

const char* Error::what() const noexcept { return details_->text.c_str(); }
const std::vector<int>& Error::ranks() const noexcept { return details_->ranks; }
const std::string& Error::layer() const noexcept { return details_->layer; }

void Error::set_layer(const std::string& layer, const std::string& call) {
  if (details_->layer.empty()) {
    details_ = std::make_shared<const Details>(
        Details{call + ": " + details_->text, layer, details_->ranks});
  }
}

// Out of line, so that the type information of each lives in the library alone.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
DivergenceError::~DivergenceError() = default;
ExchangeTimeout::~ExchangeTimeout() = default;
PeerLost::~PeerLost() = default;
Unavailable::~Unavailable() = default;

}  // namespace syncbn
