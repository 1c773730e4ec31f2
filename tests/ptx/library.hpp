// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "decode.hpp"
#include "grid.hpp"
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
    std::uint64_t thread_instructions = 0;
    const Program& program();
  };

  /// All files *.ptx of a folder.
  static std::unique_ptr<Library> read(const std::string& folder);
  void add(std::string text, const std::string& file);

  /// Throws KernelError if there is none.
  Entry& entry_of(const void* function);
  std::vector<Entry>& entries() { return entries_; }
  const std::vector<std::unique_ptr<Module>>& modules() const { return modules_; }

 private:
  std::vector<std::unique_ptr<Module>> modules_;
  std::vector<Entry> entries_;
  std::multimap<std::string, std::size_t> by_name_;
  std::map<const void*, std::vector<std::size_t>> by_function_;
};

/// What a launch did, for who counts instructions.
struct Record {
  const Program* program = nullptr;
  unsigned blocks = 0;
  unsigned threads = 0;
  Execution execution;
};

/// How the library's launches are run from now on, until another session begins.
struct Session {
  Library* library = nullptr;
  bool weak = false;
  bool races = true;
  /// With counts of basic blocks, if it is there.
  std::function<void(Record)> record;
  std::uint64_t thread_instructions = 0;
};
Session& session();

/// From now on launches of emulated kernels run the session's PTX.
void use_ptx();

}  // namespace syncbn::ptx
