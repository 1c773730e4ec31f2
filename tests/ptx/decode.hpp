// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lanes.hpp"
#include "syntax.hpp"

namespace syncbn::ptx {

/// Throws SyntaxError at what the interpreter does not know.
std::unique_ptr<Program> decode(const Module& module, const EntryText& entry);

}  // namespace syncbn::ptx
