// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace syncbn::ptx {

const char* value_of(const std::string& argument, const char* option) {
  return argument.starts_with(option) ? argument.c_str() + std::strlen(option) : nullptr;
}

int run_command(int argc, char** argv, const std::function<bool(const std::string&)>& take,
                const std::function<int(Library&)>& body) {
  try {
    const char* given = std::getenv("SYNCBN_PTX");
    std::string folder = given != nullptr ? given : "";
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (const char* value = value_of(argument, "--ptx=")) {
        folder = value;
      } else if (!take(argument)) {
        std::printf("unknown argument %s\n", argv[i]);
        return 2;
      }
    }
    if (folder.empty()) {
      std::printf("no PTX: give --ptx=FOLDER, or SYNCBN_PTX in the environment\n");
      return 2;
    }
    const auto library = Library::read(folder);
    session().library = library.get();
    use_ptx();
    return body(*library);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}

}  // namespace syncbn::ptx
