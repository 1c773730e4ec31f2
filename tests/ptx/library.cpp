// SPDX-License-Identifier: Apache-2.0
#include "library.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "emulator.hpp"
#include "grid.hpp"
#include "symbols.hpp"

namespace syncbn::ptx {
namespace {

std::string stem(const std::string& file) { return std::filesystem::path(file).stem().string(); }

Launch launch_of(const emulation::KernelLaunch& kernel, Library::Entry& entry) {
  const Program& program = entry.program();
  Launch launch;
  launch.program = &program;
  launch.blocks = kernel.blocks;
  launch.threads = kernel.threads;
  launch.shared_bytes = kernel.shared_bytes;
  launch.parameters.resize(program.parameter_bytes);
  if (kernel.arguments.size() != program.parameter_sizes.size()) {
    throw KernelError(program.name + ": launched with " + std::to_string(kernel.arguments.size()) +
                      " arguments");
  }
  for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
    const std::vector<std::byte>& argument = kernel.arguments[i];
    if (argument.size() != program.parameter_sizes[i]) {
      throw KernelError(program.name + ": argument " + std::to_string(i) + " has " +
                        std::to_string(argument.size()) + " bytes, in PTX " +
                        std::to_string(program.parameter_sizes[i]));
    }
    std::copy(
        argument.begin(), argument.end(),
        launch.parameters.begin() + static_cast<std::ptrdiff_t>(program.parameter_offsets[i]));
  }
  return launch;
}

Library* used = nullptr;

void run_ptx(const emulation::KernelLaunch& kernel) {
  Library::Entry& entry = used->entry_of(kernel.kernel);
  ++entry.launches;
  const emulation::Settings& settings = emulation::settings();
  used->thread_instructions += run(
      launch_of(kernel, entry),
      {.seed = settings.seed, .resident = settings.resident, .last_blocks = settings.last_blocks});
}

}  // namespace

const Program& Library::Entry::program() {
  if (kernel == nullptr) {
    kernel = decode(*module, *text);
  }
  return *kernel;
}

std::unique_ptr<Library> Library::read(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& one : std::filesystem::directory_iterator(folder)) {
    if (one.path().extension() == ".ptx") {
      files.push_back(one.path());
    }
  }
  if (files.empty()) {
    throw SyntaxError("no *.ptx in " + folder);
  }
  std::sort(files.begin(), files.end());
  auto out = std::make_unique<Library>();
  for (const auto& path : files) {
    std::ifstream in(path);
    out->add({std::istreambuf_iterator<char>(in), {}}, path.filename().string());
  }
  return out;
}

void Library::add(std::string text, const std::string& file) {
  modules_.push_back(std::make_unique<Module>(std::move(text), file));
  for (const EntryText& one : modules_.back()->entries()) {
    by_name_.emplace(common_name(one.name), entries_.size());
    entries_.push_back({modules_.back().get(), &one, nullptr});
  }
}

Library::Entry& Library::entry_of(const void* function) {
  auto [found, fresh] = by_function_.try_emplace(function);
  std::vector<std::size_t>& candidates = found->second;
  std::string names;
  for (const Symbol& symbol : fresh ? symbols_of(function) : std::vector<Symbol>()) {
    const auto [begin, end] = by_name_.equal_range(common_name(symbol.name));
    for (auto one = begin; one != end; ++one) {
      // Functions of one name that are files' own are told apart by the file.
      if (symbol.file.empty() || std::distance(begin, end) == 1 ||
          stem(symbol.file) == stem(entries_[one->second].module->file())) {
        candidates.push_back(one->second);
      }
    }
    names += " " + symbol.name;
  }
  if (candidates.empty()) {
    by_function_.erase(function);
    throw KernelError("no PTX for the kernel" + names);
  }
  // A template that several files have: each of them in turn.
  std::rotate(candidates.begin(), candidates.begin() + 1, candidates.end());
  return entries_[candidates.back()];
}

void use(Library& library) {
  used = &library;
  emulation::set_runner(&run_ptx);
}

}  // namespace syncbn::ptx
