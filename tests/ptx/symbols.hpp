// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace syncbn::ptx {

/// A function of this program.
struct Symbol {
  std::string name;  ///< mangled
  std::string file;  ///< whose own it is ("moments.cu"), or nothing
};

/// All names that the function at this address has, from the program's own symbol table.
std::vector<Symbol> symbols_of(const void* function);

/// A mangled name without what compilers differ in: nvcc numbers anonymous namespaces by file and
/// does not mark what is static.
std::string common_name(const std::string& mangled);

}  // namespace syncbn::ptx
