// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "emulator.hpp"

// Decoded instructions, and a warp's registers that they work on: one row of 32 values for each
// register, of which an instruction takes those of the lanes that execute it.
namespace syncbn::ptx {

using emulation::KernelError;

inline constexpr unsigned kLanes = emulation::kWarp;
inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

struct Warp;
struct Instruction;
struct Block;
/// Executes an instruction for the lanes of the mask.
using Handler = void (*)(Warp&, const Instruction&, std::uint32_t mask);

enum class Kind : std::uint8_t {
  kPlain,
  kBranch,
  kExit,
  kWarpMeeting,  ///< shuffles and the like: its handler runs when all lanes are there
  kWarpBarrier,  ///< the same, and orders memory
  kBlockBarrier,
};

enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kLocal, kParameter };

/// A register as an operand. Constants are rows, too, which all warps share.
using Register = std::uint32_t;
inline constexpr Register kConstantBit = 0x80000000u;
inline constexpr Register kSink = 0x7fffffffu;  ///< "_", nothing

struct Instruction {
  Handler run = nullptr;
  Register d = 0, a = 0, b = 0, c = 0;  ///< predicates have numbers of their own
  std::uint32_t guard = 0;              ///< predicate 0 is true
  std::uint32_t guard_flip = 0;         ///< all ones: executes where the guard is false
  std::uint32_t p = 0;                  ///< a predicate that is written; 0: none
  std::uint32_t q = 0;                  ///< one that is read
  std::uint32_t r = 0;                  ///< one that is read, of which
  std::uint32_t r_flip = 0;             ///< all ones: the opposite
  Kind kind = Kind::kPlain;
  Space space = Space::kGeneric;
  std::uint8_t bytes = 0;   ///< of one element of an access
  bool sign = false;        ///< which a load extends
  bool pauses = false;      ///< others may come between it and what follows
  std::uint32_t parts = 0;  ///< first of Program::parts, registers of a vector
  std::uint32_t count = 0;  ///< of them
  std::int64_t offset = 0;  ///< of an address; a branch's target
  std::uint64_t extra = 0;  ///< what an operation knows of itself
  int line = 0;
  std::uint32_t block = 0;  ///< basic block
};

/// Consecutive instructions that a thread enters at the first and leaves after the last, which is
/// where threads may change.
struct BasicBlock {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

struct Program {
  std::string name;  ///< as in PTX
  std::string file;
  std::vector<Instruction> code;
  std::vector<BasicBlock> blocks;
  std::vector<Register> parts;
  std::vector<std::string> opcodes;  ///< of each instruction
  std::vector<std::uint64_t> constants;
  std::uint32_t registers = 0;
  std::uint32_t predicates = 0;
  std::size_t parameter_bytes = 0;
  std::vector<std::size_t> parameter_offsets, parameter_sizes;
  std::size_t local_bytes = 0;
  std::size_t shared_bytes = 0;  ///< without what the launch adds
};

struct Warp {
  const std::uint64_t* rows[2] = {};  ///< registers and constants
  std::vector<std::uint64_t> registers;
  std::vector<std::uint32_t> defined;  ///< lanes that have written a register
  std::vector<std::uint32_t> predicates;
  std::vector<std::uint32_t> predicates_defined;
  std::uint32_t carry = 0;
  const Program* program = nullptr;
  Block* block = nullptr;
  unsigned index = 0;       ///< in the block
  std::uint32_t lanes = 0;  ///< that exist
  std::uint32_t exited = 0;
  std::uint32_t waiting = 0;
  std::uint32_t pc[kLanes] = {};
  std::uint8_t team[kLanes] = {};  ///< lanes of a team run together where they can
  bool teams_in_turn = false;      ///< one goes on alone until it waits, then the next
  std::uint32_t barriers = 0;      ///< warp barriers so far
};

[[noreturn]] void fail(const Warp& warp, const Instruction& at, unsigned lane,
                       const std::string& what);

inline const std::uint64_t* row(const Warp& w, Register r) {
  return w.rows[r >> 31] + std::size_t{r & ~kConstantBit} * kLanes;
}
inline std::uint64_t* written(Warp& w, Register r) {
  return w.registers.data() + std::size_t{r} * kLanes;
}
inline std::uint32_t defined(const Warp& w, Register r) {
  return (r & kConstantBit) != 0 ? kAllLanes : w.defined[r];
}
inline void define(Warp& w, Register r, std::uint32_t mask, std::uint32_t lanes) {
  w.defined[r] = (w.defined[r] & ~mask) | (lanes & mask);
}
inline void define_predicate(Warp& w, std::uint32_t p, std::uint32_t mask, std::uint32_t values,
                             std::uint32_t lanes) {
  if (p != 0) {
    w.predicates[p] = (w.predicates[p] & ~mask) | (values & mask);
    w.predicates_defined[p] = (w.predicates_defined[p] & ~mask) | (lanes & mask);
  }
}

/// Every lane of the mask must have the value.
inline void require_defined(const Warp& w, const Instruction& i, std::uint32_t mask,
                            std::uint32_t lanes, const char* what) {
  if ((mask & ~lanes) != 0) [[unlikely]] {
    fail(w, i, static_cast<unsigned>(std::countr_zero(mask & ~lanes)),
         std::string(what) + " was never written");
  }
}

template <class Function>
inline void each(std::uint32_t mask, Function&& function) {
  if (mask == kAllLanes) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      function(lane);
    }
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    function(static_cast<unsigned>(std::countr_zero(mask)));
  }
}

template <class T>
inline T get(std::uint64_t value) {
  if constexpr (std::same_as<T, float>) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value));
  } else if constexpr (std::same_as<T, double>) {
    return std::bit_cast<double>(value);
  } else {
    return static_cast<T>(value);
  }
}
template <class T>
inline std::uint64_t put(T value) {
  if constexpr (std::same_as<T, float>) {
    return std::bit_cast<std::uint32_t>(value);
  } else if constexpr (std::same_as<T, double>) {
    return std::bit_cast<std::uint64_t>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

/// d = F(a, ...) for values of one type, as many as F takes. Operands that an instruction does not
/// have are constants.
template <class T, class F>
void apply(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  const std::uint64_t* const b = row(w, i.b);
  const std::uint64_t* const c = row(w, i.c);
  std::uint64_t* const d = written(w, i.d);
  const std::uint32_t known = defined(w, i.a) & defined(w, i.b) & defined(w, i.c);
  each(mask, [&](unsigned l) {
    if constexpr (std::is_invocable_v<F, T>) {
      d[l] = put(F()(get<T>(a[l])));
    } else if constexpr (std::is_invocable_v<F, T, T>) {
      d[l] = put(F()(get<T>(a[l]), get<T>(b[l])));
    } else {
      d[l] = put(F()(get<T>(a[l]), get<T>(b[l]), get<T>(c[l])));
    }
  });
  define(w, i.d, mask, known);
}

template <class T>
struct Tag {
  using Type = T;
};
/// f(Tag<T>) for the C++ type of a PTX type; false if it has none here.
template <class F>
bool with_integer(const std::string& type, F&& f) {
  const std::string bits = type.size() > 1 ? type.substr(1) : "";
  const bool sign = type[0] == 's';
  if (type[0] != 's' && type[0] != 'u' && type[0] != 'b') {
    return false;
  }
  if (bits == "8") {
    sign ? f(Tag<std::int8_t>()) : f(Tag<std::uint8_t>());
  } else if (bits == "16") {
    sign ? f(Tag<std::int16_t>()) : f(Tag<std::uint16_t>());
  } else if (bits == "32") {
    sign ? f(Tag<std::int32_t>()) : f(Tag<std::uint32_t>());
  } else if (bits == "64") {
    sign ? f(Tag<std::int64_t>()) : f(Tag<std::uint64_t>());
  } else {
    return false;
  }
  return true;
}
template <class F>
bool with_float(const std::string& type, F&& f) {
  if (type == "f32") {
    f(Tag<float>());
  } else if (type == "f64") {
    f(Tag<double>());
  } else {
    return false;
  }
  return true;
}

}  // namespace syncbn::ptx
