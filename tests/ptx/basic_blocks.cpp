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
    if (i.kind != Kind::kPlain || i.pauses) {
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
    for (std::uint32_t at = block.begin; at < block.end; ++at) {
      program.code[at].block = static_cast<std::uint32_t>(program.blocks.size());
    }
    program.blocks.push_back(block);
  }
}

}  // namespace syncbn::ptx
