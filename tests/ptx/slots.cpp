// SPDX-License-Identifier: Apache-2.0
#include "slots.hpp"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace syncbn::ptx {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

bool is_value(Register r) { return (r & kConstantBit) == 0 && r != kSink; }

struct Uses {
  std::uint32_t block = kNone;
  std::uint32_t last = 0;
  bool shared = true;  ///< may share a row
};

}  // namespace

void share_slots(Program& program, std::uint32_t values) {
  std::vector<Uses> uses(values);
  const auto loads_parts = [&](std::size_t at) {
    const std::string& op = program.opcodes[at];
    return op.starts_with("ld") || op.starts_with("mov");
  };
  const auto note = [&](std::size_t at, Register r, bool target) {
    if (!is_value(r)) {
      return;
    }
    Uses& use = uses[r];
    const std::uint32_t block = program.code[at].block;
    if (use.block == kNone) {
      use.block = block;
      use.shared = target && program.code[at].guard == 0;
    }
    use.shared = use.shared && use.block == block;
    use.last = static_cast<std::uint32_t>(at);
  };
  for (std::size_t at = 0; at < program.code.size(); ++at) {
    const Instruction& i = program.code[at];
    // A part of a move may be read or written, by what d is.
    const bool targets = loads_parts(at) && i.d == kSink;
    for (const Register r : {i.a, i.b, i.c}) {
      note(at, r, false);
    }
    for (std::uint32_t k = 0; k < i.count; ++k) {
      note(at, program.parts[i.parts + k], targets);
    }
    note(at, i.d, true);
  }
  std::vector<std::uint32_t> slot(values, kNone);
  std::uint32_t slots = 0;
  for (std::uint32_t v = 0; v < values; ++v) {
    if (uses[v].block != kNone && !uses[v].shared) {
      slot[v] = slots++;
    }
  }
  const std::uint32_t first_shared = slots;
  std::vector<std::uint32_t> free;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> live;  // last use and row
  for (const BasicBlock& block : program.blocks) {
    free.clear();
    live.clear();
    for (std::uint32_t s = slots; s-- > first_shared;) {
      free.push_back(s);
    }
    const auto give = [&](std::uint32_t at, Register r) {
      if (!is_value(r) || slot[r] != kNone) {
        return;
      }
      if (free.empty()) {
        free.push_back(slots++);
      }
      slot[r] = free.back();
      free.pop_back();
      live.emplace_back(uses[r].last, slot[r]);
      (void)at;
    };
    for (std::uint32_t at = block.begin; at < block.end; ++at) {
      const auto dead = std::partition(live.begin(), live.end(),
                                       [&](const auto& one) { return one.first >= at; });
      for (auto one = dead; one != live.end(); ++one) {
        free.push_back(one->second);
      }
      live.erase(dead, live.end());
      const Instruction& i = program.code[at];
      for (std::uint32_t k = 0; k < i.count; ++k) {
        give(at, program.parts[i.parts + k]);
      }
      give(at, i.d);
    }
  }
  for (Instruction& i : program.code) {
    for (Register* r : {&i.d, &i.a, &i.b, &i.c}) {
      *r = is_value(*r) ? slot[*r] : *r;
    }
  }
  for (Register& r : program.parts) {
    r = is_value(r) ? slot[r] : r;
  }
  program.registers = slots;
}

}  // namespace syncbn::ptx
