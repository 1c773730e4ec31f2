// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "library.hpp"

// What the programs of this folder have in common: --ptx=FOLDER, or SYNCBN_PTX in the environment,
// is the session's library; other arguments are the program's own.
namespace syncbn::ptx {

/// "--seeds=8" is "8" for "--seeds=", else null.
const char* value_of(const std::string& argument, const char* option);

/// take is given each argument, and returns false if it does not know it. body's result is the
/// program's, 2 where there is no PTX or something was thrown.
int run_command(int argc, char** argv, const std::function<bool(const std::string&)>& take,
                const std::function<int(Library&)>& body);

}  // namespace syncbn::ptx
