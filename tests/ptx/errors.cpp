// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "grid.hpp"

// What a kernel did wrong, in words.
namespace syncbn::ptx {

void fail(const Warp& warp, const Instruction& at, unsigned lane, const std::string& what) {
  const auto number = static_cast<std::size_t>(&at - warp.program->code.data());
  throw KernelError(warp.program->file + ", line " + std::to_string(at.line) + " (" +
                    warp.program->opcodes[number] + "), thread " +
                    std::to_string(warp.index * kLanes + lane) + " of block " +
                    std::to_string(warp.block->index) + " of " + warp.program->name + ": " + what);
}

void report_deadlock(const Grid& grid) {
  std::string text;
  int shown = 0;
  const Program& program = *grid.launch->program;
  for (const auto& block : grid.resident) {
    std::string last;
    for (const Warp& warp : block->warps) {
      each(warp.lanes, [&](unsigned l) {
        const bool ended = (warp.exited >> l & 1u) != 0;
        const std::string state = ended ? " has ended"
                                        : " waits in line " +
                                              std::to_string(program.code[warp.pc[l]].line) + " (" +
                                              program.opcodes[warp.pc[l]] + ")";
        if (state != last && shown < 6) {
          text += (shown++ > 0 ? "; thread " : " thread ") +
                  std::to_string(warp.index * kLanes + l) + " of block " +
                  std::to_string(block->index) + state;
          last = state;
        }
      });
    }
  }
  throw KernelError(program.file + ", " + program.name + ": no thread can go on:" + text);
}

}  // namespace syncbn::ptx
