// SPDX-License-Identifier: Apache-2.0
#include "symbols.hpp"

#include <elf.h>
#include <link.h>

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

namespace syncbn::ptx {
namespace {

template <class T>
const T* at(const std::vector<char>& file, std::size_t offset, std::size_t count = 1) {
  if (offset + count * sizeof(T) > file.size()) {
    throw std::runtime_error("the program's file is cut off");
  }
  return reinterpret_cast<const T*>(file.data() + offset);
}

std::multimap<std::uintptr_t, Symbol> read_symbols() {
  std::ifstream in("/proc/self/exe", std::ios::binary);
  const std::vector<char> file((std::istreambuf_iterator<char>(in)), {});
  std::uintptr_t base = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {  // the program itself comes first
        *static_cast<std::uintptr_t*>(out) = info->dlpi_addr;
        return 1;
      },
      &base);
  std::multimap<std::uintptr_t, Symbol> out;
  const auto* header = at<ElfW(Ehdr)>(file, 0);
  const auto* sections = at<ElfW(Shdr)>(file, header->e_shoff, header->e_shnum);
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) {
      continue;
    }
    const char* const names = at<char>(file, sections[sections[s].sh_link].sh_offset);
    const std::size_t count = sections[s].sh_size / sizeof(ElfW(Sym));
    const auto* symbols = at<ElfW(Sym)>(file, sections[s].sh_offset, count);
    std::string of_file;
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned type = symbols[i].st_info & 15u;
      const bool local = symbols[i].st_info >> 4 == STB_LOCAL;
      if (type == STT_FILE) {
        of_file = names + symbols[i].st_name;
      } else if (type == STT_FUNC && symbols[i].st_value != 0) {
        out.emplace(base + symbols[i].st_value,
                    Symbol{names + symbols[i].st_name, local ? of_file : ""});
      }
    }
  }
  if (out.empty()) {
    throw std::runtime_error("the program has no symbol table: link it without stripping");
  }
  return out;
}

}  // namespace

std::vector<Symbol> symbols_of(const void* function) {
  static const std::multimap<std::uintptr_t, Symbol> kAll = read_symbols();
  const auto [begin, end] = kAll.equal_range(reinterpret_cast<std::uintptr_t>(function));
  std::vector<Symbol> out;
  for (auto one = begin; one != end; ++one) {
    out.push_back(one->second);
  }
  return out;
}

std::string common_name(const std::string& mangled) {
  std::string out;
  const auto digit = [&](std::size_t i) {
    return i < mangled.size() && std::isdigit(static_cast<unsigned char>(mangled[i])) != 0;
  };
  for (std::size_t i = 0; i < mangled.size();) {
    const char c = mangled[i];
    if (digit(i)) {  // the length of an identifier, and the identifier
      std::size_t used = 0;
      const std::size_t length = std::stoul(mangled.substr(i), &used);
      const std::string identifier = mangled.substr(i + used, length);
      out += identifier.starts_with("_GLOBAL__N_") ? "12_GLOBAL__N_1"
                                                   : std::to_string(length) + identifier;
      i += used + length;
    } else if (c == 'L' && digit(i + 1)) {  // of internal linkage
      ++i;
    } else if (c == 'L') {  // a literal, up to its E
      const std::size_t end = mangled.find('E', i);
      out += mangled.substr(i, end - i);
      i = end == std::string::npos ? mangled.size() : end;
    } else if ((c == 'S' || c == 'T') && i + 1 < mangled.size() &&
               (digit(i + 1) || mangled[i + 1] == '_')) {  // a substitution, up to its _
      const std::size_t end = mangled.find('_', i);
      out += mangled.substr(i, end + 1 - i);
      i = end + 1;
    } else {
      out += c;
      ++i;
    }
  }
  return out;
}

}  // namespace syncbn::ptx
