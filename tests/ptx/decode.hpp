#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "lanes.hpp"
#include "syntax.hpp"

namespace syncbn::ptx {

/// A program and the memory of its module's variables.
struct Kernel {
  Program program;
  std::vector<std::unique_ptr<std::vector<std::byte>>> variables;
};

/// Throws SyntaxError at what the interpreter does not know.
std::unique_ptr<Kernel> decode(const Module& module, const EntryText& entry);

}  // namespace syncbn::ptx
