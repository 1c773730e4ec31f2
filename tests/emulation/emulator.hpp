// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>

// CUDA's execution model on one CPU thread: every CUDA thread is a fiber that runs until it meets
// others at a barrier or shuffle, in an order that a seed decides. Stricter than a GPU where a
// GPU's behaviour is undefined; weaker in one respect: memory is sequentially consistent, so a
// missing fence goes unnoticed.
namespace syncbn::emulation {

/// A kernel did what is undefined on a GPU.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Failure {
  const char* text = nullptr;
  bool of_earlier_work = false;
};

struct Settings {
  std::uint64_t seed = 1;           ///< of the order in which threads and blocks run
  int multiprocessors = 2;          ///< as the device reports it
  bool few_binary64_units = false;  ///< what the primitive of that name answers
  unsigned resident = 3;            ///< blocks that run at a time; 0: launches are only counted
  unsigned last_blocks = 0;         ///< run only so many of a grid, its last; 0: all
  int device = 0;                   ///< the current one's number
  Failure launch_failure = {};      ///< what launches and loads answer
  Failure load_failure = {};
};
Settings& settings();

/// What happened since the program began.
struct Counts {
  std::uint64_t launches = 0;
  std::uint64_t launches_of_unloaded = 0;  ///< of kernels not loaded on that device before
  std::uint64_t loads = 0;
  std::uint64_t vector_accesses = 0;  ///< of several elements at once
  std::uint64_t single_accesses = 0;
};
const Counts& counts();
void note_launch(const void* kernel);
void note_load(const void* kernel);
void note_access(int elements);

/// A launch: a function that runs one thread of it.
struct KernelLaunch {
  unsigned blocks;
  unsigned threads;
  std::size_t shared_bytes;
  std::function<void()> thread;
};

/// Runs the kernel to its end. Throws KernelError.
void run(const KernelLaunch& kernel);

inline constexpr unsigned kWarp = 32;

struct Place {
  unsigned thread;
  unsigned block;
  unsigned threads;
  unsigned blocks;
};
const Place& place();
void* shared_memory();

enum class Operation : std::uint8_t { kNone, kBlockBarrier, kWarpBarrier, kShuffle, kVote };

/// Waits for all threads of the block.
void meet_block(const std::source_location& at);
/// Waits for all threads of the warp, which must be at the same place of the source; hands out the
/// value that each brought.
const std::uint64_t* meet_warp(Operation operation, std::uint64_t value,
                               const std::source_location& at);
/// A point where another thread may go first.
void pause();

void check_aligned(const void* address, std::size_t alignment, const char* what);

}  // namespace syncbn::emulation
