// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "command.hpp"
#include "defect_cases.hpp"
#include "emulator.hpp"

// Plants defects in the text of PTX, one at a time: fences and barriers deleted, orders weakened,
// scopes made smaller, shuffles from a wrong lane or with a wrong mask, stores narrowed. Each must
// be noticed, by other bits than the intact kernel's or by a refusal, in one of a few orders of
// threads.
//   syncbn_ptx_defects --ptx=FOLDER [--all] [--seeds=N] [--no-races] [--verbose] [KIND...]
// Fences, scopes and barriers: each of them. Of the other kinds two for each kernel; --all: each.
namespace syncbn::ptx {
namespace {

/// Blocks take several jobs each where there is one multiprocessor.
void settings_of(int seed) {
  emulation::settings() = {.seed = static_cast<std::uint64_t>(seed),
                           .multiprocessors = seed % 2 == 0 ? 1 : 3};
}

struct Defect {
  std::string kind;
  std::size_t entry;
  int line;            ///< in the entry's text
  std::string before;  ///< the statement
  std::string after;
};

std::string line_of(const std::string& text, int line, std::size_t* begin, std::size_t* end) {
  *begin = 0;
  for (int i = 0; i < line; ++i) {
    *begin = text.find('\n', *begin) + 1;
  }
  *end = text.find('\n', *begin);
  return text.substr(*begin, *end - *begin);
}

/// All defects of an entry's text.
std::vector<Defect> defects_of(const std::string& text, std::size_t entry) {
  std::vector<Defect> out;
  static const std::regex kShuffle(
      R"((.*shfl\.sync\.\w+\.b32\s+[^,]+,\s*[^,]+,\s*)([^,]+)(,\s*[^,]+,\s*)([^;]+);)");
  static const std::regex kStore(R"((.*st\.\w+\.)([usfb])(32|64)(\s.*))");
  std::size_t at = 0;
  std::smatch match;
  for (int line = 0; at < text.size(); ++line) {
    std::size_t end = text.find('\n', at);
    end = end == std::string::npos ? text.size() : end;
    const std::string one = text.substr(at, end - at);
    at = end + 1;
    const auto has = [&](const char* what) { return one.find(what) != std::string::npos; };
    if (has("membar.") || has("fence.")) {
      out.push_back({"fence", entry, line, one, ""});
    } else if (has(".acq_rel.")) {
      std::string weaker = one;
      out.push_back({"fence", entry, line, one, weaker.replace(one.find("acq_rel"), 7, "relaxed")});
    } else if (has(".acquire.sys") || has(".release.sys")) {
      const std::string order = has(".acquire.sys") ? "acquire" : "release";
      std::string weaker = one;
      out.push_back({"fence", entry, line, one, weaker.replace(one.find(order), 7, "relaxed")});
      std::string smaller = one;
      out.push_back({"scope", entry, line, one, smaller.replace(one.find(".sys"), 4, ".gpu")});
    } else if (has("bar.warp.sync") || has("barrier.warp")) {
      out.push_back({"warp_barrier", entry, line, one, ""});
    } else if (has("bar.sync") || has("barrier.sync") || has("barrier.cta")) {
      out.push_back({"barrier", entry, line, one, ""});
    } else if (has("shfl.sync") && std::regex_match(one, match, kShuffle)) {
      const std::string lane = match[2];
      const bool number = lane.find('%') == std::string::npos;
      const std::string other = number ? std::to_string(std::stoi(lane) ^ 1) : "1";
      out.push_back({"lane", entry, line, one,
                     match[1].str() + other + match[3].str() + match[4].str() + ";"});
      out.push_back(
          {"mask", entry, line, one, match[1].str() + lane + match[3].str() + "0x7fffffff;"});
    } else if ((has("st.global") || has("st.shared")) && !has(".v2.") && !has(".v4.") &&
               std::regex_match(one, match, kStore)) {
      const std::string half = match[3].str() == "64" ? "b32" : "b16";
      out.push_back({"store", entry, line, one, match[1].str() + half + match[4].str()});
    }
  }
  return out;
}

class Check {
 public:
  Check(Library& library, int seeds) : library_(library), seeds_(seeds), cases_(all_cases()) {}

  /// What the intact kernels give, and which cases launch which. (That any order of threads gives
  /// the same is what syncbn_ptx_tests --weak says.)
  bool prepare() {
    settings_of(1);
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      std::vector<std::uint64_t> launches;
      for (const auto& entry : library_.entries()) {
        launches.push_back(entry.launches);
      }
      try {
        cases_[i].expected = cases_[i].run();
      } catch (const KernelError& error) {
        std::printf("%s: %s\n", cases_[i].name.c_str(), error.what());
        return false;
      }
      for (std::size_t e = 0; e < launches.size(); ++e) {
        if (library_.entries()[e].launches > launches[e]) {
          by_entry_[e].insert(i);
        }
      }
    }
    return true;
  }
  const std::map<std::size_t, std::set<std::size_t>>& launched() const { return by_entry_; }

  /// How it gave itself away; empty if it did not.
  std::string noticed(const Defect& defect) {
    Library::Entry& entry = library_.entries()[defect.entry];
    const Module& whole = *entry.module;
    std::string text = whole.text().substr(entry.text->begin, entry.text->end - entry.text->begin);
    std::size_t begin = 0;
    std::size_t end = 0;
    line_of(text, defect.line, &begin, &end);
    text.replace(begin, end - begin, defect.after);
    const std::size_t head = whole.text().find(".entry");
    const Module planted(whole.text().substr(0, whole.text().rfind('\n', head)) + "\n" + text,
                         whole.file());
    std::unique_ptr<Program> kernel;
    try {
      kernel = decode(planted, planted.entries().at(0));
    } catch (const SyntaxError& error) {
      return error.what();
    }
    entry.program();
    std::swap(entry.kernel, kernel);
    std::string out;
    for (int seed = 1; seed <= seeds_ && out.empty(); ++seed) {
      for (const std::size_t i : by_entry_.at(defect.entry)) {
        settings_of(seed);
        try {
          out = cases_[i].run() != cases_[i].expected ? "other bits" : "";
        } catch (const KernelError& error) {
          out = error.what();
        }
        if (!out.empty()) {
          break;
        }
      }
    }
    std::swap(entry.kernel, kernel);
    return out;
  }

 private:
  Library& library_;
  int seeds_;
  std::vector<Case> cases_;
  std::map<std::size_t, std::set<std::size_t>> by_entry_;
};

struct Wanted {
  int seeds = 6;
  std::size_t most = 2;  ///< of a kind and kernel; fences and barriers: all of them
  std::set<std::string> kinds;
  bool verbose = false;
  int only_line = 0;

  bool take(const std::string& argument) {
    if (const char* number = value_of(argument, "--seeds=")) {
      seeds = std::stoi(number);
    } else if (const char* line = value_of(argument, "--line=")) {
      only_line = std::stoi(line);
    } else if (argument == "--all") {
      most = 1u << 30;
    } else if (argument == "--no-races") {
      session().races = false;
    } else if (argument == "--verbose") {
      verbose = true;
    } else {
      kinds.insert(argument);
    }
    return true;
  }
};

int plant(Library& library, const Wanted& wanted) {
  session().weak = true;
  Check check(library, wanted.seeds);
  if (!check.prepare()) {
    return 1;
  }
  std::map<std::string, std::pair<int, int>> found;  // noticed and planted
  for (const auto& [number, cases] : check.launched()) {
    const Library::Entry& entry = library.entries()[number];
    const std::string text =
        entry.module->text().substr(entry.text->begin, entry.text->end - entry.text->begin);
    std::map<std::string, std::vector<Defect>> by_kind;
    for (const Defect& one : defects_of(text, number)) {
      by_kind[one.kind].push_back(one);
    }
    for (auto& [kind, all] : by_kind) {
      if (!wanted.kinds.empty() && wanted.kinds.count(kind) == 0) {
        continue;
      }
      if (wanted.only_line > 0) {
        std::erase_if(all, [&](const Defect& one) {
          return entry.text->line + one.line != wanted.only_line;
        });
      }
      const bool every =
          kind == "fence" || kind == "scope" || kind == "barrier" || kind == "warp_barrier";
      testing::Random random(number);
      random.shuffle(all);
      all.resize(every ? all.size() : std::min(all.size(), wanted.most));
      for (const Defect& one : all) {
        const std::string how = check.noticed(one);
        auto& [noticed, planted] = found[kind];
        ++planted;
        noticed += how.empty() ? 0 : 1;
        if (how.empty() || wanted.verbose) {
          std::printf("%s %s, line %d of %s: %s\n  %s\n",
                      how.empty() ? "NOT noticed:" : "noticed:", kind.c_str(),
                      entry.text->line + one.line, entry.module->file().c_str(),
                      entry.text->name.c_str(), how.empty() ? one.before.c_str() : how.c_str());
        }
      }
    }
  }
  int missed = 0;
  for (const auto& [kind, count] : found) {
    std::printf("%s: %d of %d planted defects noticed\n", kind.c_str(), count.first, count.second);
    missed += count.second - count.first;
  }
  return missed == 0 && !found.empty() ? 0 : 1;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  using namespace syncbn::ptx;
  Wanted wanted;
  return run_command(
      argc, argv, [&](const std::string& argument) { return wanted.take(argument); },
      [&](Library& library) { return plant(library, wanted); });
}
