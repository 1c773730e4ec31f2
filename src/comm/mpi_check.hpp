// SPDX-License-Identifier: Apache-2.0
#pragma once

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <array>
#include <cstddef>
#include <string>

#include "syncbn/error.hpp"

namespace syncbn {

inline std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  return MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS
             ? std::string(text.data(), static_cast<std::size_t>(length))
             : "error " + std::to_string(code);
}

/// Throws Error with MPI's text unless the call succeeded.
inline void check_mpi(int code, const std::string& who, const char* call, const char* file,
                      int line) {
  if (code != MPI_SUCCESS) {
    throw Error(who + call + " failed at " + file + ":" + std::to_string(line) + ": " +
                mpi_text(code));
  }
}

#define SYNCBN_MPI_CHECK(who, call) ::syncbn::check_mpi((call), (who), #call, __FILE__, __LINE__)

/// Whether MPI may be called. These two functions may be called at any time.
inline bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

/// Whether MPI allows this thread to call it.
inline bool on_mpis_thread() {
  if (!mpi_is_running()) {
    return false;
  }
  int level = MPI_THREAD_SINGLE;
  int is_main = 0;
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&is_main);
  return level >= MPI_THREAD_SERIALIZED || is_main != 0;
}

}  // namespace syncbn
