// SPDX-License-Identifier: Apache-2.0
#include "decode.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "basic_blocks.hpp"
#include "grid.hpp"
#include "operations.hpp"
#include "slots.hpp"

namespace syncbn::ptx {
namespace {

class Decoder {
 public:
  Decoder(const Module& module, const EntryText& entry)
      : module_(module), function_(module.parse(entry)), out_(std::make_unique<Program>()) {}

  std::unique_ptr<Program> run() {
    Program& program = (*out_);
    program.name = function_.name;
    program.file = module_.file();
    program.parameter_bytes = function_.parameter_bytes;
    for (const Parameter& one : function_.parameters) {
      program.parameter_offsets.push_back(one.offset);
      program.parameter_sizes.push_back(one.bytes);
      symbols_[one.name] = one.offset;
    }
    constant(0);
    number_registers();
    place_variables();
    for (const Statement& s : function_.body) {
      current_ = &s;
      program.code.push_back(instruction(s));
      program.opcodes.push_back(s.opcode());
    }
    if (program.code.empty() || program.code.back().kind != Kind::kExit) {
      program.code.emplace_back();
      program.code.back().kind = Kind::kExit;
      program.code.back().d = kSink;
      program.opcodes.emplace_back("exit");
    }
    cut_into_blocks(program, function_.labels);
    share_slots(program, values_);
    for (const std::uint64_t value : constants_) {
      program.constants.insert(program.constants.end(), kLanes, value);
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void unknown(const std::string& what) const {
    throw SyntaxError(module_.file() + ", line " + std::to_string(current_->line) + ", " +
                      function_.name + ": " + what + " in " + current_->opcode());
  }

  void number_registers() {
    std::uint32_t predicates = 1;
    for (const auto& [name, type] : function_.registers) {
      if (type == "pred") {
        predicates_[name] = predicates++;
      } else {
        registers_[name] = values_++;
      }
    }
    out_->predicates = predicates;
  }
  /// Where variables lie: offsets in shared and local memory, addresses of others.
  void place_variables() {
    Program& program = (*out_);
    std::vector<Variable> all = module_.variables();
    all.insert(all.end(), function_.variables.begin(), function_.variables.end());
    std::vector<std::string> external;
    for (const Variable& one : all) {
      if (one.external) {
        external.push_back(one.name);
      } else if (one.space == "shared" || one.space == "local") {
        std::size_t& end = one.space == "shared" ? program.shared_bytes : program.local_bytes;
        end = (end + one.align - 1) / one.align * one.align;
        symbols_[one.name] = end;
        end += one.bytes;
      } else {
        throw SyntaxError(module_.file() + ": a variable in ." + one.space + ": " + one.name);
      }
    }
    program.shared_bytes = (program.shared_bytes + 15) / 16 * 16;
    for (const std::string& name : external) {
      symbols_[name] = program.shared_bytes;
    }
  }
  Register constant(std::uint64_t value) {
    const auto [found, fresh] =
        constant_numbers_.emplace(value, static_cast<std::uint32_t>(constants_.size()));
    if (fresh) {
      constants_.push_back(value);
    }
    return found->second | kConstantBit;
  }

  Register source(const Operand& o) {
    if (o.kind == Operand::Kind::kInteger || o.kind == Operand::Kind::kFloat) {
      return constant(o.bits);
    }
    if (o.kind != Operand::Kind::kName || o.negated) {
      unknown("an operand of an unexpected kind");
    }
    if (const auto found = registers_.find(o.name); found != registers_.end()) {
      return found->second;
    }
    if (const auto found = symbols_.find(o.name); found != symbols_.end()) {
      return constant(found->second);
    }
    unknown("unknown name " + o.name);
  }
  Register target(const Operand& o) {
    const Register out = source(o);
    if ((out & kConstantBit) != 0) {
      unknown("a result without a register");
    }
    return out;
  }
  std::uint32_t predicate(const std::string& name) {
    const auto found = predicates_.find(name);
    if (found == predicates_.end()) {
      unknown("no predicate: " + name);
    }
    return found->second;
  }
  /// A predicate that is read, or a constant.
  void read_predicate(const Operand& o, Instruction& i) {
    const bool number = o.kind == Operand::Kind::kInteger;
    i.r = number ? 0 : predicate(o.name);
    i.r_flip = o.negated != (number && o.bits == 0) ? kAllLanes : 0;
  }
  void address(const Operand& o, Instruction& i) {
    if (o.kind != Operand::Kind::kAddress) {
      unknown("no address");
    }
    i.offset = static_cast<std::int64_t>(o.bits);
    i.a = constant(0);
    if (const auto found = registers_.find(o.name); found != registers_.end()) {
      i.a = found->second;
    } else if (!o.name.empty()) {
      const auto symbol = symbols_.find(o.name);
      if (symbol == symbols_.end()) {
        unknown("unknown name " + o.name);
      }
      i.offset += static_cast<std::int64_t>(symbol->second);
    }
  }
  void parts(const Operand& o, Instruction& i, bool targets) {
    const std::vector<Operand> one = {o};
    const std::vector<Operand>& all = o.kind == Operand::Kind::kVector ? o.parts : one;
    i.parts = static_cast<std::uint32_t>(out_->parts.size());
    i.count = static_cast<std::uint32_t>(all.size());
    for (const Operand& part : all) {
      out_->parts.push_back(targets ? target(part) : source(part));
    }
    if (i.count > 8) {
      unknown("more than 8 elements");
    }
  }
  std::size_t label(const std::string& name) {
    const auto found = function_.labels.find(name);
    if (found == function_.labels.end()) {
      unknown("unknown label " + name);
    }
    return found->second;
  }

  Instruction instruction(const Statement& s) {
    Instruction i;
    i.line = s.line;
    i.a = i.b = i.c = constant(0);
    i.d = kSink;
    if (!s.guard.empty()) {
      i.guard = predicate(s.guard);
      i.guard_flip = s.guard_negated ? kAllLanes : 0;
    }
    if (!control(s, i) && !memory(s, i) && !together(s, i) && !predicates(s, i)) {
      values(s, i);
    }
    if (i.run == nullptr && i.kind == Kind::kPlain) {
      unknown("unknown operation " + s.op[0]);
    }
    return i;
  }

  bool control(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    if (op == "bra") {
      i.kind = Kind::kBranch;
      i.offset = static_cast<std::int64_t>(label(s.operands.at(0).name));
    } else if (op == "ret") {
      i.kind = Kind::kExit;
    } else if (s.opcode() == "bar.sync") {
      i.kind = Kind::kBlockBarrier;
      if (s.operands.size() != 1 || s.operands[0].bits != 0) {
        unknown("a barrier that is not the block's first");
      }
    } else {
      return false;
    }
    return true;
  }
  bool memory(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    i.run = access(s, i);
    if (i.run == nullptr) {
      return false;
    }
    if (op == "ld") {
      parts(s.operands.at(0), i, true);
      address(s.operands.at(1), i);
    } else if (op == "st") {
      address(s.operands.at(0), i);
      parts(s.operands.at(1), i, false);
    } else if (op == "atom" || op == "red") {
      const std::size_t at = op == "atom" ? 1 : 0;
      i.d = op == "atom" ? target(s.operands.at(0)) : kSink;
      address(s.operands.at(at), i);
      i.b = source(s.operands.at(at + 1));
    }
    return true;
  }

  bool together(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    if (op != "shfl" && op != "vote" && op != "bar") {
      return false;
    }
    i.run = meeting(s, i);
    if (i.run == nullptr) {
      unknown("an unknown form");
    }
    std::size_t at = 0;
    if (i.kind != Kind::kWarpBarrier) {
      const Operand& out = s.operands.at(at++);
      if (predicates_.count(out.name) != 0) {
        i.p = predicate(out.name);
      } else {
        i.d = target(out);
      }
      i.p = out.second.empty() ? i.p : predicate(out.second);
    }
    if (op == "vote") {
      read_predicate(s.operands.at(at++), i);
    } else if (op == "shfl") {
      i.b = source(s.operands.at(2));
      i.c = source(s.operands.at(3));
      i.a = source(s.operands.at(at));
    }
    parts(s.operands.back(), i, false);  // the mask
    return true;
  }

  bool predicates(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    const auto& o = s.operands;
    if (op == "setp") {
      i.p = predicate(o.at(0).name);
      i.a = source(o.at(1));
      i.b = source(o.at(2));
    } else if (op == "selp") {
      i.d = target(o.at(0));
      i.a = source(o.at(1));
      i.b = source(o.at(2));
      read_predicate(o.at(3), i);
    } else if (s.op.back() == "pred") {
      i.p = predicate(o.at(0).name);
      read_predicate(o.back(), i);
      if (o.size() > 2) {
        i.q = predicate(o[1].name);
      } else if (op == "not") {
        i.r_flip = ~i.r_flip;
      }
    } else {
      return false;
    }
    i.run = selection(s);
    return true;
  }

  void values(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    const auto& o = s.operands;
    if (op == "mov" && o.at(1).kind == Operand::Kind::kName && o[1].name[0] == '%' &&
        registers_.count(o[1].name) == 0) {
      i.run = special_register(o[1].name);
      i.d = target(o[0]);
      if (i.run == nullptr) {
        unknown("unknown special register " + o[1].name);
      }
      return;
    }
    if (op == "mov" || s.opcode() == "cvta.to.global.u64") {
      i.run = selection(s);
    } else if (op == "cvt") {
      i.run = conversion(s);
    } else {
      i.run = s.op.back()[0] == 'f' ? float_operation(s) : integer_operation(s, i.extra);
    }
    if (i.run == nullptr) {
      unknown("an unknown form");
    }
    if (op == "mov" &&
        (o.at(0).kind == Operand::Kind::kVector || o.at(1).kind == Operand::Kind::kVector)) {
      const bool unpacks = o[0].kind == Operand::Kind::kVector;
      i.bytes = static_cast<std::uint8_t>(std::stoul(s.op.back().substr(1)) / 8);
      parts(o[unpacks ? 0 : 1], i, unpacks);
      (unpacks ? i.a : i.d) = unpacks ? source(o[1]) : target(o[0]);
      return;
    }
    i.d = target(o.at(0));
    if (i.d == kSink) {
      unknown("no result");
    }
    i.a = source(o.at(1));
    i.b = o.size() > 2 ? source(o[2]) : i.b;
    i.c = o.size() > 3 ? source(o[3]) : i.c;
    if (o.size() > 4 && op == "bfi") {
      parts(o[4], i, false);
    }
  }

  const Module& module_;
  Function function_;
  std::unique_ptr<Program> out_;
  const Statement* current_ = nullptr;
  std::uint32_t values_ = 0;
  std::map<std::string, std::uint32_t> registers_;
  std::map<std::string, std::uint32_t> predicates_;
  std::map<std::string, std::uint64_t> symbols_;
  std::map<std::uint64_t, std::uint32_t> constant_numbers_;
  std::vector<std::uint64_t> constants_;
};

}  // namespace

std::unique_ptr<Program> decode(const Module& module, const EntryText& entry) {
  return Decoder(module, entry).run();
}

}  // namespace syncbn::ptx
