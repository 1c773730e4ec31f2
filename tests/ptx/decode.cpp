#include "decode.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "grid.hpp"
#include "operations.hpp"
#include "slots.hpp"

namespace syncbn::ptx {
namespace {

/// extra is added to an address, on the way into a window of generic addresses or out of it.
void shift_address(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = a[l] + i.extra; });
  define(w, i.d, mask, defined(w, i.a));
}
/// isspacep: extra is the window.
void is_in_window(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* const a = row(w, i.a);
  std::uint32_t out = 0;
  each(mask, [&](unsigned l) {
    out |= static_cast<std::uint32_t>((a[l] & kWindowMask) == i.extra) << l;
  });
  define_predicate(w, i.p, mask, out, defined(w, i.a));
}
void trap(Warp& w, const Instruction& i, std::uint32_t mask) {
  fail(w, i, static_cast<unsigned>(std::countr_zero(mask)), "a trap");
}

class Decoder {
 public:
  Decoder(const Module& module, const EntryText& entry)
      : module_(module), function_(module.parse(entry)), out_(std::make_unique<Kernel>()) {}

  std::unique_ptr<Kernel> run() {
    Program& program = out_->program;
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
    cut_into_blocks();
    mark_unused_results();
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
    out_->program.predicates = predicates;
  }
  /// Where variables lie: offsets in shared and local memory, addresses of others.
  void place_variables() {
    Program& program = out_->program;
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
        auto memory = std::make_unique<std::vector<std::byte>>(one.initial);
        memory->resize(one.bytes);
        symbols_[one.name] = reinterpret_cast<std::uint64_t>(memory->data());
        out_->variables.push_back(std::move(memory));
      }
    }
    program.external_shared = !external.empty();
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
    if (o.kind == Operand::Kind::kName && o.name == "_") {
      return kSink;
    }
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
    i.parts = static_cast<std::uint32_t>(out_->program.parts.size());
    i.count = static_cast<std::uint32_t>(all.size());
    for (const Operand& part : all) {
      out_->program.parts.push_back(targets ? target(part) : source(part));
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
    const std::string& op = s.op[0];
    if (!control(s, i) && !memory(s, i) && !together(s, i) && !predicates(s, i)) {
      values(s, i);
    }
    if (i.run == nullptr && i.kind == Kind::kPlain) {
      unknown("unknown operation " + op);
    }
    return i;
  }

  bool control(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    if (op == "bra") {
      i.kind = Kind::kBranch;
      i.offset = static_cast<std::int64_t>(label(s.operands.at(0).name));
    } else if (op == "brx") {
      i.kind = Kind::kIndexedBranch;
      i.a = source(s.operands.at(0));
      i.extra = out_->program.branch_tables.size();
      auto& table = out_->program.branch_tables.emplace_back();
      for (const std::string& name : function_.branch_targets[s.operands.at(1).name]) {
        table.push_back(static_cast<std::uint32_t>(label(name)));
      }
    } else if (op == "ret" || op == "exit") {
      i.kind = Kind::kExit;
    } else if (op == "trap") {
      i.run = &trap;
    } else if ((op == "bar" || op == "barrier") && !s.has("warp") && !s.has("cluster")) {
      block_barrier(s, i);
    } else {
      return false;
    }
    return true;
  }
  /// a: the number; b: how many threads, if bytes is set; extra: 0 waits, 1 arrives, else of red.
  void block_barrier(const Statement& s, Instruction& i) {
    i.kind = Kind::kBlockBarrier;
    std::size_t at = 0;
    if (s.has("red")) {
      i.extra = s.has("popc") ? 2 : s.has("and") ? 3 : 4;
      (s.has("popc") ? i.d : i.p) =
          s.has("popc") ? target(s.operands[at]) : predicate(s.operands[at].name);
      ++at;
      read_predicate(s.operands.back(), i);
    } else {
      i.extra = s.has("arrive") ? 1 : 0;
    }
    i.a = source(s.operands.at(at++));
    const std::size_t end = s.operands.size() - (s.has("red") ? 1 : 0);
    if (at < end) {
      i.b = source(s.operands[at]);
      i.bytes = 1;
    }
  }

  bool memory(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    i.run = access(s, i);
    if (i.run == nullptr) {
      return false;
    }
    if (op == "ld" || op == "ldu") {
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
      if (s.operands.size() > at + 2 && s.has("cas")) {
        i.c = source(s.operands[at + 2]);
      }
    }
    return true;
  }

  bool together(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    if (op != "shfl" && op != "vote" && op != "match" && op != "redux" && op != "elect" &&
        op != "activemask" && op != "bar" && op != "barrier") {
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
      i.p = out.second.empty() || out.second == "_" ? i.p : predicate(out.second);
    }
    if (i.kind == Kind::kPlain) {
      return true;
    }
    if (op == "vote") {
      read_predicate(s.operands.at(at++), i);
    } else if (op == "shfl") {
      i.b = source(s.operands.at(2));
      i.c = source(s.operands.at(3));
    }
    if (op == "shfl" || op == "match" || op == "redux") {
      i.a = source(s.operands.at(at));
    }
    parts(s.operands.back(), i, false);  // the mask
    return true;
  }

  bool predicates(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    const auto& o = s.operands;
    if (op == "setp" || op == "set" || op == "selp" || s.op.back() == "pred") {
      i.run = selection(s, i.extra);
      if (i.run == nullptr) {
        unknown("an unknown form");
      }
    }
    if (op == "setp" || op == "set") {
      if (op == "setp") {
        i.p = o.at(0).name == "_" ? 0 : predicate(o.at(0).name);
        i.q = o[0].second.empty() || o[0].second == "_" ? 0 : predicate(o[0].second);
      } else {
        i.d = target(o.at(0));
        const std::string& type = s.op[s.op.size() - 2];
        i.bytes = type == "f32" ? 0 : 4;
      }
      i.a = source(o.at(1));
      i.b = source(o.at(2));
      if (o.size() > 3) {
        read_predicate(o[3], i);
      }
    } else if (op == "selp") {
      i.d = target(o.at(0));
      i.a = source(o.at(1));
      i.b = source(o.at(2));
      read_predicate(o.at(3), i);
    } else if (s.op.back() == "pred") {
      i.p = predicate(o.at(0).name);
      if (o.size() > 2) {
        i.q = predicate(o[1].name);
        read_predicate(o[2], i);
      } else {  // of one predicate: and with a true one
        Operand always;
        always.name = o.at(1).name;
        const bool number = o[1].kind == Operand::Kind::kInteger;
        i.q = number ? 0 : predicate(o[1].name);
        if (number && o[1].bits == 0) {
          i.run = selection({0, "", false, {"not", "pred"}, {}}, i.extra);
        }
      }
    } else if (op == "testp") {
      i.run = float_operation(s, i.extra);
      i.p = predicate(o.at(0).name);
      i.a = source(o.at(1));
    } else if (op == "isspacep") {
      i.run = &is_in_window;
      i.p = predicate(o.at(0).name);
      i.a = source(o.at(1));
      i.extra = window(s);
    } else {
      return false;
    }
    return true;
  }
  static std::uint64_t window(const Statement& s) {
    return s.has("shared") || s.has("shared::cta")   ? kSharedWindow
           : s.has("local")                          ? kLocalWindow
           : s.has("param") || s.has("param::entry") ? kParameterWindow
                                                     : 0;
  }

  void values(const Statement& s, Instruction& i) {
    const std::string& op = s.op[0];
    const auto& o = s.operands;
    if (op == "cvta") {
      i.run = &shift_address;
      i.extra = s.has("to") ? 0 - window(s) : window(s);
    } else if (op == "mov" && o.at(1).kind == Operand::Kind::kName && o[1].name[0] == '%' &&
               registers_.count(o[1].name) == 0) {
      i.run = special_register(o[1].name);
      i.d = target(o[0]);
      if (i.run == nullptr) {
        unknown("unknown special register " + o[1].name);
      }
      return;
    } else if (op == "mov" || op == "slct") {
      i.run = selection(s, i.extra);
    } else if (op == "cvt") {
      i.run = conversion(s);
      for (const char* how : {"rni", "rzi", "rmi", "rpi"}) {
        i.extra = s.has(how) ? static_cast<std::uint64_t>(how[1]) : i.extra;
      }
    } else {
      const std::string& type = s.op.back();
      i.run = type[0] == 'f' || type[0] == 'b' ? float_operation(s, i.extra) : nullptr;
      if (i.run == nullptr) {
        i.run = integer_operation(s, i.extra);
      }
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

  /// Threads may change where one ends: at branches, meetings, atomics, fences.
  void cut_into_blocks() {
    Program& program = out_->program;
    std::set<std::size_t> leaders = {0};
    for (const auto& [name, at] : function_.labels) {
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
  /// An atomic whose result nobody reads is a reduction, which ptxas makes of it.
  void mark_unused_results() {
    Program& program = out_->program;
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

  const Module& module_;
  Function function_;
  std::unique_ptr<Kernel> out_;
  const Statement* current_ = nullptr;
  std::uint32_t values_ = 0;
  std::map<std::string, std::uint32_t> registers_;
  std::map<std::string, std::uint32_t> predicates_;
  std::map<std::string, std::uint64_t> symbols_;
  std::map<std::uint64_t, std::uint32_t> constant_numbers_;
  std::vector<std::uint64_t> constants_;
};

}  // namespace

std::unique_ptr<Kernel> decode(const Module& module, const EntryText& entry) {
  return Decoder(module, entry).run();
}

}  // namespace syncbn::ptx
