// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// PTX as text: functions, their variables and statements. What statements mean is decode.hpp's.
namespace syncbn::ptx {

/// A program that is no PTX, or has something that the interpreter does not know.
class SyntaxError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Operand {
  enum class Kind : std::uint8_t { kName, kInteger, kFloat, kAddress, kVector };
  Kind kind = Kind::kName;
  bool negated = false;    ///< !%p
  std::string name;        ///< a register, label or variable; of an address, its base or nothing
  std::string second;      ///< %p of %r|%p
  std::uint64_t bits = 0;  ///< of a number; of an address, the offset
  std::vector<Operand> parts;
};

struct Statement {
  int line = 0;
  std::string guard;  ///< a predicate, or nothing
  bool guard_negated = false;
  std::vector<std::string> op;  ///< "ld.global.u32" at its dots
  std::vector<Operand> operands;

  std::string opcode() const;
  bool has(std::string_view part) const;
};

struct Variable {
  std::string space;  ///< global, const, shared, local
  std::string name;
  std::size_t align = 1;
  std::size_t bytes = 0;
  bool external = false;  ///< the launch decides how large it is
};

struct Parameter {
  std::string name;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct Function {
  std::string name;
  int line = 0;
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0;
  std::vector<Statement> body;
  std::map<std::string, std::size_t> labels;     ///< place in the body
  std::map<std::string, std::string> registers;  ///< name and type
  std::vector<Variable> variables;
};

/// Where the text of an entry lies in that of its module.
struct EntryText {
  std::string name;
  std::size_t begin = 0;
  std::size_t end = 0;
  int line = 0;
};

/// A file of PTX. Entries are parsed one by one, when they are asked for.
class Module {
 public:
  Module(std::string text, std::string file);
  const std::string& file() const { return file_; }
  const std::string& text() const { return text_; }
  const std::vector<EntryText>& entries() const { return entries_; }
  const std::vector<Variable>& variables() const { return variables_; }
  Function parse(const EntryText& entry) const;

 private:
  std::string text_;
  std::string file_;
  std::vector<EntryText> entries_;
  std::vector<Variable> variables_;
};

}  // namespace syncbn::ptx
