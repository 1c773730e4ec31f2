// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <exception>

#include "library.hpp"

// The tests of tests/emulation and of layers, where each launch runs what nvcc made of the kernel:
//   syncbn_ptx_tests FOLDER [--gtest_...]
// With all tests, a kernel that was never launched is an error.
namespace syncbn::ptx {
namespace {

int run_tests(Library& library) {
  const auto start = std::chrono::steady_clock::now();
  const int result = RUN_ALL_TESTS();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::uint64_t launches = 0;
  int missing = 0;
  for (const Library::Entry& entry : library.entries()) {
    launches += entry.launches;
    if (entry.launches == 0 && ::testing::GTEST_FLAG(filter) == "*") {
      std::printf("no test launched %s of %s\n", entry.text->name.c_str(),
                  entry.module->file().c_str());
      ++missing;
    }
  }
  std::printf("PTX: %llu launches, %zu kernels, %.0f million instructions of threads in %.1f s\n",
              static_cast<unsigned long long>(launches), library.entries().size(),
              static_cast<double>(library.thread_instructions) / 1e6, seconds.count());
  return missing > 0 ? 1 : result;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::printf("expected one argument, the folder of the kernels' PTX\n");
    return 2;
  }
  try {
    const auto library = syncbn::ptx::Library::read(argv[1]);
    syncbn::ptx::use(*library);
    return syncbn::ptx::run_tests(*library);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
