// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "lanes.hpp"
#include "syntax.hpp"

// What each opcode does, as handlers that the decoder asks for. Null: not known here.
namespace syncbn::ptx {

Handler integer_operation(const Statement& s, std::uint64_t& extra);
Handler float_operation(const Statement& s);
Handler conversion(const Statement& s);
/// setp, selp, moves, predicates.
Handler selection(const Statement& s);
/// A special register's value: %tid.x. Null: there is none of that name.
Handler special_register(const std::string& name);
/// Loads, stores and atomics.
Handler access(const Statement& s, Instruction& out);
/// Shuffles, votes and barriers of a warp.
Handler meeting(const Statement& s, Instruction& out);

}  // namespace syncbn::ptx
