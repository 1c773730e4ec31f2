// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>

#include "syntax.hpp"

namespace syncbn::ptx {

/// Cuts PTX into words and single characters.
class Lexer {
 public:
  Lexer(std::string_view text, std::size_t at, std::size_t end, int line)
      : text_(text), at_(at), end_(end), line_(line) {
    next();
  }
  /// Empty at the end.
  std::string_view token() const { return token_; }
  std::size_t begin() const { return static_cast<std::size_t>(token_.data() - text_.data()); }
  int line() const { return line_; }
  bool is(std::string_view text) const { return token_ == text; }
  bool is_word() const { return !token_.empty() && word(token_[0]); }
  bool is_directive() const { return token_.size() > 1 && token_[0] == '.'; }

  void next() {
    skip_space();
    if (at_ >= end_) {
      token_ = text_.substr(end_, 0);
      return;
    }
    const std::size_t begin = at_;
    if (text_[at_] == '"') {
      do {
        ++at_;
      } while (at_ < end_ && text_[at_] != '"');
      ++at_;
    } else if (word(text_[at_])) {
      // Two colons belong to a word (L2::128B), one ends a label.
      while (at_ < end_ && (word(text_[at_]) ||
                            (text_[at_] == ':' && at_ + 1 < end_ &&
                             (text_[at_ + 1] == ':' || text_[at_ - 1] == ':') && at_ > begin))) {
        ++at_;
      }
    } else {
      ++at_;
    }
    token_ = text_.substr(begin, at_ - begin);
  }
  std::string take() {
    std::string out(token_);
    next();
    return out;
  }
  std::string word() {
    if (!is_word()) {
      fail("a name is missing");
    }
    return take();
  }
  bool take_if(std::string_view text) {
    if (token_ != text) {
      return false;
    }
    next();
    return true;
  }
  void expect(std::string_view text) {
    if (!take_if(text)) {
      fail("'" + std::string(text) + "' is missing");
    }
  }
  std::uint64_t number() {
    const bool negative = take_if("-");
    const std::string text = word();
    std::size_t used = 0;
    std::uint64_t value = 0;
    try {
      value = std::stoull(text, &used, 0);
    } catch (const std::exception&) {
      fail("a number is missing, there is " + text);
    }
    if (used < text.size() && text[used] != 'U') {
      fail("no number: " + text);
    }
    return negative ? ~value + 1 : value;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw SyntaxError("line " + std::to_string(line_) + ": " + what + ", before '" +
                      std::string(token_) + "'");
  }

 private:
  static bool word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }
  void skip_space() {
    while (at_ < end_) {
      if (text_[at_] == '\n') {
        ++line_;
        ++at_;
      } else if (std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        while (at_ < end_ && text_[at_] != '\n') {
          ++at_;
        }
      } else if (text_.substr(at_, 2) == "/*") {
        const std::size_t close = text_.find("*/", at_);
        for (; at_ < end_ && at_ < close + 2; ++at_) {
          line_ += text_[at_] == '\n' ? 1 : 0;
        }
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  std::size_t at_;
  std::size_t end_;
  int line_;
  std::string_view token_;
};

}  // namespace syncbn::ptx
