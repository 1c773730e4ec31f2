// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "decode.hpp"
#include "syntax.hpp"

// All kernels of some PTX, and which of them a function of the library stands for.
namespace syncbn::ptx {

class Library {
 public:
  struct Entry {
    const Module* module = nullptr;
    const EntryText* text = nullptr;
    std::unique_ptr<Program> kernel;  ///< once it was asked for
    std::uint64_t launches = 0;
    const Program& program();
  };

  /// All files *.ptx of a folder.
  static std::unique_ptr<Library> read(const std::string& folder);
  void add(std::string text, const std::string& file);

  /// Throws KernelError if there is none.
  Entry& entry_of(const void* function);
  std::vector<Entry>& entries() { return entries_; }
  std::uint64_t thread_instructions = 0;  ///< of all launches

 private:
  std::vector<std::unique_ptr<Module>> modules_;
  std::vector<Entry> entries_;
  std::multimap<std::string, std::size_t> by_name_;
  std::map<const void*, std::vector<std::size_t>> by_function_;
};

/// From now on launches of emulated kernels run this PTX.
void use(Library& library);

}  // namespace syncbn::ptx
