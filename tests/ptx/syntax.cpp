// SPDX-License-Identifier: Apache-2.0
#include "syntax.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lexer.hpp"

namespace syncbn::ptx {
namespace {

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> out;
  while (true) {
    const std::size_t end = text.find(at);
    out.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return out;
    }
    text.remove_prefix(end + 1);
  }
}

/// Bytes of a type: "b32".
std::size_t bytes_of(const std::string& type, const Lexer& lexer) {
  const std::size_t digits = type.find_first_of("0123456789");
  if (digits == std::string::npos) {
    lexer.fail("unknown type ." + type);
  }
  return std::stoul(type.substr(digits)) / 8;
}

/// "%p<4>" makes %p0 to %p3.
class Body {
 public:
  Body(Lexer& lexer, Function& function) : lexer_(lexer), out_(function) {}

  void parse() {
    lexer_.expect("{");
    scopes_.emplace_back();
    while (!scopes_.empty()) {
      if (lexer_.token().empty()) {
        lexer_.fail("a function without an end");
      } else if (lexer_.take_if("{")) {
        scopes_.emplace_back();
      } else if (lexer_.is("}")) {
        scopes_.pop_back();
        if (!scopes_.empty()) {
          lexer_.next();
        }
      } else if (lexer_.is_directive()) {
        directive();
      } else {
        statement();
      }
    }
    lexer_.next();
  }

 private:
  void directive() {
    const std::string name = lexer_.take();
    if (name == ".reg") {
      registers();
    } else if (name == ".local" || name == ".shared") {
      out_.variables.push_back(variable(lexer_, name.substr(1)));
    } else if (name == ".loc" || name == ".pragma") {
      while (!lexer_.take_if(";") && name == ".pragma") {
        lexer_.next();
      }
      for (int i = 0; name == ".loc" && i < 3; ++i) {
        lexer_.next();
      }
    } else {
      lexer_.fail("unknown directive " + name);
    }
  }
  void registers() {
    std::string type = lexer_.word().substr(1);
    do {
      const std::string name = lexer_.word();
      std::uint64_t count = 0;
      if (lexer_.take_if("<")) {
        count = lexer_.number();
        lexer_.expect(">");
      }
      for (std::uint64_t i = 0; i < std::max<std::uint64_t>(count, 1); ++i) {
        const std::string one = count == 0 ? name : name + std::to_string(i);
        // Those of inner braces hide others of the same name.
        const std::string mine =
            scopes_.size() == 1 ? one : one + "#" + std::to_string(out_.registers.size());
        scopes_.back()[one] = mine;
        out_.registers[mine] = type;
      }
    } while (lexer_.take_if(","));
    lexer_.expect(";");
  }
  std::string resolve(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) {
        return found->second;
      }
    }
    return name;
  }
  void statement() {
    Statement out;
    out.line = lexer_.line();
    if (lexer_.take_if("@")) {
      out.guard_negated = lexer_.take_if("!");
      out.guard = resolve(lexer_.word());
    }
    const std::string word = lexer_.word();
    if (lexer_.take_if(":")) {
      if (!out_.labels.emplace(word, out_.body.size()).second) {
        lexer_.fail("a second label " + word);
      }
      return;
    }
    out.op = split(word, '.');
    while (!lexer_.take_if(";")) {
      out.operands.push_back(operand());
      if (!lexer_.is(";")) {
        lexer_.expect(",");
      }
    }
    out_.body.push_back(std::move(out));
  }
  Operand operand() {
    Operand out;
    if (lexer_.take_if("{")) {
      out.kind = Operand::Kind::kVector;
      do {
        out.parts.push_back(operand());
      } while (lexer_.take_if(","));
      lexer_.expect("}");
      return out;
    }
    if (lexer_.take_if("[")) {
      out.kind = Operand::Kind::kAddress;
      if (lexer_.is("-") || std::isdigit(static_cast<unsigned char>(lexer_.token()[0])) != 0) {
        out.bits = lexer_.number();
      } else {
        out.name = resolve(lexer_.word());
        if (lexer_.take_if("+")) {
          out.bits = lexer_.number();
        } else if (lexer_.is("-")) {
          out.bits = lexer_.number();
        }
      }
      lexer_.expect("]");
      return out;
    }
    out.negated = lexer_.take_if("!");
    const std::string_view text = lexer_.token();
    if (text == "-" || (!text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) != 0)) {
      number(out);
      return out;
    }
    out.name = resolve(lexer_.word());
    if (lexer_.take_if("|")) {
      out.second = resolve(lexer_.word());
    }
    return out;
  }
  void number(Operand& out) {
    const std::string_view text = lexer_.token();
    if (text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1]) != nullptr) {
      out.kind = Operand::Kind::kFloat;
      out.bits = std::stoull(std::string(text.substr(2)), nullptr, 16);
      lexer_.next();
      return;
    }
    out.kind = Operand::Kind::kInteger;
    out.bits = lexer_.number();
  }

 public:
  /// After ".shared" and the like: ".align 8 .b8 name[16];"
  static Variable variable(Lexer& lexer, const std::string& space) {
    Variable out;
    out.space = space;
    if (lexer.take_if(".align")) {
      out.align = lexer.number();
    }
    const std::size_t element = bytes_of(lexer.word().substr(1), lexer);
    out.align = std::max(out.align, element);
    out.name = lexer.word();
    std::size_t count = 1;
    while (lexer.take_if("[")) {
      count *= lexer.is("]") ? 0 : lexer.number();
      lexer.expect("]");
    }
    out.bytes = count * element;
    out.external = count == 0;
    lexer.expect(";");
    return out;
  }

 private:
  Lexer& lexer_;
  Function& out_;
  std::vector<std::map<std::string, std::string>> scopes_;
};

void parse_parameters(Lexer& lexer, Function& out) {
  lexer.expect("(");
  while (!lexer.take_if(")")) {
    Parameter one;
    std::size_t align = 1;
    lexer.expect(".param");
    if (lexer.take_if(".align")) {
      align = lexer.number();
    }
    one.bytes = bytes_of(lexer.word().substr(1), lexer);
    align = std::max(align, one.bytes);
    while (lexer.is_directive()) {  // .ptr .global .align 8
      if (lexer.take() == ".align") {
        lexer.next();
      }
    }
    one.name = lexer.word();
    if (lexer.take_if("[")) {
      one.bytes *= lexer.number();
      lexer.expect("]");
    }
    one.offset = (out.parameter_bytes + align - 1) / align * align;
    out.parameter_bytes = one.offset + one.bytes;
    out.parameters.push_back(one);
    lexer.take_if(",");
  }
}

}  // namespace

std::string Statement::opcode() const {
  std::string out;
  for (const std::string& part : op) {
    out += (out.empty() ? "" : ".") + part;
  }
  return out;
}

bool Statement::has(std::string_view part) const {
  return std::find(op.begin() + 1, op.end(), part) != op.end();
}

Module::Module(std::string text, std::string file)
    : text_(std::move(text)), file_(std::move(file)) {
  Lexer lexer(text_, 0, text_.size(), 1);
  while (!lexer.token().empty()) {
    const std::size_t begin = lexer.begin();
    const int line = lexer.line();
    const std::string word = lexer.take();
    if (word == ".entry") {
      EntryText entry{lexer.take(), begin, 0, line};
      while (!lexer.is("{") && !lexer.token().empty()) {
        lexer.next();
      }
      int depth = 0;
      do {
        depth += lexer.is("{") ? 1 : lexer.is("}") ? -1 : 0;
        entry.end = lexer.begin() + 1;
        lexer.next();
      } while (depth > 0 && !lexer.token().empty());
      entries_.push_back(std::move(entry));
    } else if (word == ".func") {
      lexer.fail("functions that are called are not known");
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      variables_.push_back(Body::variable(lexer, word.substr(1)));
    } else if (word == ".section") {
      break;  // debug information
    }
  }
}

Function Module::parse(const EntryText& entry) const {
  Lexer lexer(text_, entry.begin, entry.end, entry.line);
  Function out;
  out.line = entry.line;
  try {
    lexer.expect(".entry");
    out.name = lexer.word();
    parse_parameters(lexer, out);
    while (lexer.is_directive()) {  // .maxntid 256, 1, 1
      do {
        lexer.next();
      } while (!lexer.is("{") && !lexer.is_directive() && !lexer.token().empty());
    }
    Body(lexer, out).parse();
  } catch (const SyntaxError& error) {
    throw SyntaxError(file_ + ", " + entry.name + ", " + error.what());
  }
  return out;
}

}  // namespace syncbn::ptx
