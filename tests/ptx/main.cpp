// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "command.hpp"

// The tests of tests/emulation and of layers, where each launch runs what nvcc made of the kernel:
//   syncbn_ptx_tests --ptx=FOLDER [--weak [--no-races]] [--kernels] [--gtest_...]
// --weak: global memory as weak as PTX has it, and races are errors; --no-races: bits decide.
// --kernels: an error if some kernel was never launched.
namespace syncbn::ptx {
namespace {

void report(double seconds) {
  std::uint64_t launches = 0;
  std::size_t kernels = 0;
  for (const Library::Entry& entry : session().library->entries()) {
    launches += entry.launches;
    kernels += entry.launches > 0 ? 1 : 0;
  }
  const auto millions = static_cast<double>(session().thread_instructions) / 1e6;
  std::printf(
      "PTX: %llu launches of %zu of %zu kernels, %.0f million instructions of threads in %.1f s\n",
      static_cast<unsigned long long>(launches), kernels, session().library->entries().size(),
      millions, seconds);
}

int missing_kernels() {
  int missing = 0;
  for (const Library::Entry& entry : session().library->entries()) {
    if (entry.launches == 0) {
      std::printf("no test launched %s of %s\n", entry.text->name.c_str(),
                  entry.module->file().c_str());
      ++missing;
    }
  }
  return missing;
}

int run_tests(bool all_kernels) {
  const auto start = std::chrono::steady_clock::now();
  const int result = RUN_ALL_TESTS();
  report(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return all_kernels && missing_kernels() > 0 ? 1 : result;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  using syncbn::ptx::session;
  ::testing::InitGoogleTest(&argc, argv);
  if (::testing::GTEST_FLAG(list_tests)) {
    return RUN_ALL_TESTS();
  }
  bool all_kernels = false;
  return syncbn::ptx::run_command(
      argc, argv,
      [&](const std::string& argument) {
        session().weak = session().weak || argument == "--weak";
        session().races = session().races && argument != "--no-races";
        all_kernels = all_kernels || argument == "--kernels";
        return argument == "--weak" || argument == "--no-races" || argument == "--kernels";
      },
      [&](syncbn::ptx::Library&) { return syncbn::ptx::run_tests(all_kernels); });
}
