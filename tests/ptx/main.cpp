#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "library.hpp"

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

int run_tests(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* folder = std::getenv("SYNCBN_PTX");
  bool all_kernels = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--ptx=")) {
      folder = argv[i] + 6;
    } else if (argument == "--weak") {
      session().weak = true;
    } else if (argument == "--no-races") {
      session().races = false;
    } else if (argument == "--kernels") {
      all_kernels = true;
    } else {
      std::printf("unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (::testing::GTEST_FLAG(list_tests)) {
    return RUN_ALL_TESTS();
  }
  if (folder == nullptr) {
    std::printf("no PTX: give --ptx=FOLDER, or SYNCBN_PTX in the environment\n");
    return 2;
  }
  const auto library = Library::read(folder);
  session().library = library.get();
  use_ptx();
  const auto start = std::chrono::steady_clock::now();
  int result = RUN_ALL_TESTS();
  report(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (all_kernels && missing_kernels() > 0) {
    result = 1;
  }
  return result;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  try {
    return syncbn::ptx::run_tests(argc, argv);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
