// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include <algorithm>
#include <bit>
#include <string>

namespace syncbn::ptx {
namespace {

/// Lanes that run together from here to where they next meet others.
void draw_teams(Random& random, Warp& warp, std::uint32_t lanes) {
  const std::uint64_t drawn = random.bits();
  const unsigned teams = drawn % 4 == 0 ? 2 : drawn % 16 == 1 ? 5 : 1;
  warp.teams_in_turn = (drawn >> 8) % 2 != 0;
  std::uint64_t bits = teams == 1 ? 0 : random.bits();
  each(lanes, [&](unsigned l) {
    warp.team[l] = static_cast<std::uint8_t>(bits % teams);
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    bits ^= bits >> 33;
  });
}

class Runner {
 public:
  explicit Runner(Grid& grid) : grid_(grid), program_(*grid.launch->program) {}

  /// Runs some lanes of the warp for a while. False: none of them can.
  bool step(Warp& warp) {
    const std::uint32_t runnable = warp.lanes & ~warp.exited & ~warp.waiting;
    if (runnable == 0) {
      return false;
    }
    // Lanes behind the others go first, so that they meet again; sometimes any lane, and sometimes
    // a team goes on alone until it waits.
    auto leader = static_cast<unsigned>(std::countr_zero(runnable));
    if (grid_.random.one_in(8)) {
      std::uint32_t rest = runnable;
      for (std::uint64_t skip =
               grid_.random.below(static_cast<std::uint64_t>(std::popcount(runnable)));
           skip > 0; --skip) {
        rest &= rest - 1;
      }
      leader = static_cast<unsigned>(std::countr_zero(rest));
    } else {
      each(runnable, [&](unsigned l) {
        const bool first = warp.teams_in_turn && warp.team[l] != warp.team[leader]
                               ? warp.team[l] < warp.team[leader]
                               : warp.pc[l] < warp.pc[leader];
        leader = first ? l : leader;
      });
    }
    std::uint32_t group = 0;
    each(runnable, [&](unsigned l) {
      group |= static_cast<std::uint32_t>(warp.pc[l] == warp.pc[leader] &&
                                          warp.team[l] == warp.team[leader])
               << l;
    });
    run(warp, group, warp.pc[leader]);
    return true;
  }

 private:
  static std::uint32_t executing(const Warp& warp, const Instruction& i, std::uint32_t mask) {
    if (i.guard != 0) {
      require_defined(warp, i, mask, warp.predicates_defined[i.guard], "the predicate");
    }
    return mask & (warp.predicates[i.guard] ^ i.guard_flip);
  }
  void stay(Warp& warp, std::uint32_t mask, std::uint32_t pc) {
    each(mask, [&](unsigned l) { warp.pc[l] = pc; });
  }

  void run(Warp& warp, std::uint32_t mask, std::uint32_t pc) {
    for (std::uint64_t blocks = 1 + grid_.random.below(32); blocks > 0; --blocks) {
      const Instruction* const code = program_.code.data();
      const BasicBlock& block = program_.blocks[code[pc].block];
      grid_.thread_instructions +=
          std::uint64_t{block.end - pc} * static_cast<unsigned>(std::popcount(mask));
      for (; pc + 1 < block.end; ++pc) {
        plain(warp, code[pc], mask);
      }
      const Instruction& last = code[pc];
      if (last.kind == Kind::kPlain) {
        plain(warp, last, mask);
        ++pc;
        if (last.pauses) {
          stay(warp, mask, pc);
          return;
        }
        continue;
      }
      const std::uint32_t taken = executing(warp, last, mask);
      if (!leave(warp, last, mask, taken, pc)) {
        return;
      }
    }
    stay(warp, mask, pc);
  }

  static void plain(Warp& warp, const Instruction& i, std::uint32_t mask) {
    const std::uint32_t taken = executing(warp, i, mask);
    if (taken != 0) {
      i.run(warp, i, taken);
    }
  }

  /// The end of a basic block. True: the whole group goes on, at pc.
  bool leave(Warp& warp, const Instruction& i, std::uint32_t mask, std::uint32_t taken,
             std::uint32_t& pc) {
    const auto target = static_cast<std::uint32_t>(i.offset);
    switch (i.kind) {
      case Kind::kBranch:
        if (taken == mask || taken == 0) {
          pc = taken == 0 ? pc + 1 : target;
          return true;
        }
        stay(warp, taken, target);
        stay(warp, mask & ~taken, pc + 1);
        return false;
      case Kind::kExit:
        warp.exited |= taken;
        warp.block->live -= static_cast<unsigned>(std::popcount(taken));
        stay(warp, mask & ~taken, pc + 1);
        return false;
      default:
        break;
    }
    if (taken == 0) {
      ++pc;
      return true;
    }
    stay(warp, mask & ~taken, pc + 1);
    stay(warp, taken, pc);
    warp.waiting |= taken;
    if (i.kind == Kind::kBlockBarrier) {
      arrive(warp, i, taken, pc);
    } else {
      meet(warp, i, taken);
    }
    return false;
  }

  /// Lets lanes go on that wait for each other, once all that they name are there.
  void meet(Warp& warp, const Instruction& i, std::uint32_t arriving) {
    const Register mask_register = program_.parts[i.parts];
    require_defined(warp, i, arriving, defined(warp, mask_register), "the mask of lanes");
    const std::uint64_t* const masks = row(warp, mask_register);
    const auto at = static_cast<std::uint32_t>(&i - program_.code.data());
    while (arriving != 0) {
      const auto lane = static_cast<unsigned>(std::countr_zero(arriving));
      const auto named = static_cast<std::uint32_t>(masks[lane]);
      if ((named >> lane & 1u) == 0) {
        fail(warp, i, lane, "its own lane is not in the mask");
      }
      const std::uint32_t members =
          i.kind == Kind::kWarpBarrier ? named & warp.lanes : named;  // a block's end may be a part
      if ((members & ~warp.lanes) != 0 || (members & warp.exited) != 0) {
        const std::uint32_t gone = members & (~warp.lanes | warp.exited);
        fail(warp, i, lane,
             "its mask names lane " + std::to_string(std::countr_zero(gone)) + ", which " +
                 ((gone & ~warp.lanes) != 0 ? "does not exist" : "has ended"));
      }
      std::uint32_t there = 0;
      each(members & warp.waiting, [&](unsigned l) {
        if (warp.pc[l] != at || static_cast<std::uint32_t>(masks[l]) != named) {
          fail(warp, i, lane,
               "lane " + std::to_string(l) + ", which its mask names, waits " +
                   (warp.pc[l] != at ? "in line " + std::to_string(program_.code[warp.pc[l]].line)
                                     : std::string("with another mask")));
        }
        there |= 1u << l;
      });
      if (there == members) {
        i.run(warp, i, members);
        warp.waiting &= ~members;
        stay(warp, members, at + 1);
        draw_teams(grid_.random, warp, members);
      }
      arriving &= ~members;
    }
  }

  void arrive(Warp& warp, const Instruction& i, std::uint32_t arriving, std::uint32_t at) {
    Block& block = *warp.block;
    Barrier& barrier = block.barrier;
    if (barrier.arrived > 0 && barrier.pc != at) {
      fail(warp, i, static_cast<unsigned>(std::countr_zero(arriving)),
           "threads of the block at different barriers: others wait in line " +
               std::to_string(program_.code[barrier.pc].line));
    }
    barrier.pc = at;
    barrier.arrived += static_cast<unsigned>(std::popcount(arriving));
    if (barrier.arrived == grid_.launch->threads) {
      release(block);
    }
  }

  void release(Block& block) {
    for (Warp& warp : block.warps) {
      stay(warp, warp.lanes, block.barrier.pc + 1);
      warp.waiting = 0;
      draw_teams(grid_.random, warp, warp.lanes);
    }
    ++block.barriers_passed;
    block.barrier = {};
  }

  Grid& grid_;
  const Program& program_;
};

}  // namespace

std::unique_ptr<Block> start_block(Grid& grid, unsigned index) {
  const Launch& launch = *grid.launch;
  const Program& program = *launch.program;
  auto block = std::make_unique<Block>(program.shared_bytes + launch.shared_bytes);
  block->grid = &grid;
  block->index = index;
  block->live = launch.threads;
  block->local.assign(launch.threads, TrackedMemory(program.local_bytes));
  block->warps.resize((launch.threads + kLanes - 1) / kLanes);
  for (unsigned i = 0; i < block->warps.size(); ++i) {
    Warp& warp = block->warps[i];
    warp.program = &program;
    warp.block = block.get();
    warp.index = i;
    const unsigned lanes = std::min(launch.threads - i * kLanes, kLanes);
    warp.lanes = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.registers.resize(std::size_t{program.registers} * kLanes);
    warp.defined.resize(program.registers);
    warp.rows[0] = warp.registers.data();
    warp.rows[1] = program.constants.data();
    warp.predicates.assign(program.predicates, 0);
    warp.predicates_defined.assign(program.predicates, 0);
    warp.predicates[0] = warp.predicates_defined[0] = kAllLanes;
  }
  for (Warp& warp : block->warps) {
    draw_teams(grid.random, warp, warp.lanes);
  }
  return block;
}

bool step(Grid& grid, Warp& warp) { return Runner(grid).step(warp); }

}  // namespace syncbn::ptx
