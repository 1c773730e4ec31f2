// SPDX-License-Identifier: Apache-2.0
#include "basic_blocks.hpp"

#include <algorithm>
#include <iterator>
#include <set>

namespace syncbn::ptx {

void cut_into_blocks(Program& program, const std::map<std::string, std::size_t>& labels) {
  std::set<std::size_t> leaders = {0};
  for (const auto& [name, at] : labels) {
    leaders.insert(at);
  }
  for (std::size_t at = 0; at < program.code.size(); ++at) {
    const Instruction& i = program.code[at];
    const std::string& op = program.opcodes[at];
    if (i.kind != Kind::kPlain || i.order.strong || op.starts_with("membar") ||
        op.starts_with("fence")) {
      leaders.insert(at + 1);
    }
  }
  for (auto leader = leaders.begin(); leader != leaders.end(); ++leader) {
    if (*leader >= program.code.size()) {
      break;
    }
    const auto next = std::next(leader);
    BasicBlock block;
    block.begin = static_cast<std::uint32_t>(*leader);
    block.end = static_cast<std::uint32_t>(
        next == leaders.end() ? program.code.size() : std::min(*next, program.code.size()));
    block.first_line = program.code[block.begin].line;
    block.last_line = program.code[block.end - 1].line;
    for (std::uint32_t at = block.begin; at < block.end; ++at) {
      program.code[at].block = static_cast<std::uint32_t>(program.blocks.size());
    }
    program.blocks.push_back(block);
  }
}

void mark_unused_results(Program& program) {
  std::set<Register> read(program.parts.begin(), program.parts.end());
  for (const Instruction& i : program.code) {
    read.insert({i.a, i.b, i.c});
  }
  for (std::size_t at = 0; at < program.code.size(); ++at) {
    Instruction& i = program.code[at];
    if (program.opcodes[at].starts_with("atom") && read.count(i.d) == 0) {
      i.d = kSink;
    }
  }
}

}  // namespace syncbn::ptx
