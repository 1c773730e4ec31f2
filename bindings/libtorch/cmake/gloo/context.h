// SPDX-License-Identifier: Apache-2.0
#pragma once

// PyTorch's wheel has the header of its Gloo backend, but not Gloo's own headers. The headers in
// this folder declare what that one names, so that programs can make such a backend: they only
// hold pointers to these classes. Do not link a Gloo of your own with them.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
