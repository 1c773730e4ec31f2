#include "syncbn/error.hpp"

namespace syncbn {

// Out of line, so that the type information of each lives in the library alone.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
DivergenceError::~DivergenceError() = default;
ExchangeTimeout::~ExchangeTimeout() = default;
PeerLost::~PeerLost() = default;
Unavailable::~Unavailable() = default;

}  // namespace syncbn
