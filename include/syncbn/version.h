// SPDX-License-Identifier: Apache-2.0
/* The only place that states the version. CMake and the Python package read it here. C may include
   this file. */
#pragma once

#define SYNCBN_VERSION_MAJOR 0
#define SYNCBN_VERSION_MINOR 2
#define SYNCBN_VERSION_PATCH 0

#define SYNCBN_STRINGIFY_DETAIL(x) #x
#define SYNCBN_STRINGIFY(x) SYNCBN_STRINGIFY_DETAIL(x)
#define SYNCBN_VERSION_STRING            \
  SYNCBN_STRINGIFY(SYNCBN_VERSION_MAJOR) \
  "." SYNCBN_STRINGIFY(SYNCBN_VERSION_MINOR) "." SYNCBN_STRINGIFY(SYNCBN_VERSION_PATCH)

#if defined(__cplusplus) && __cplusplus >= 201703L /* inline variables */
namespace syncbn {

inline constexpr const char* kVersion = SYNCBN_VERSION_STRING;

}  // namespace syncbn
#endif
