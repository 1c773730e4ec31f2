# SPDX-License-Identifier: Apache-2.0
# What SYNCBN_MPI comes to: SYNCBN_WITH_MPI says whether syncbn::mpi is built.
set(SYNCBN_WITH_MPI OFF)
if(SKBUILD)  # in PyTorch the exchange is the process group's
  return()
elseif(NOT SYNCBN_MPI)
  message(STATUS "syncbn: no groups over MPI (SYNCBN_MPI=${SYNCBN_MPI}: as asked)")
  return()
endif()
# FindMPI asks the C compiler.
if(SYNCBN_MPI STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(C)
  if(CMAKE_C_COMPILER)
    enable_language(C)
    find_package(MPI 3.0 QUIET COMPONENTS C)
  endif()
else()
  enable_language(C)
  find_package(MPI 3.0 REQUIRED COMPONENTS C)
endif()
if(MPI_C_FOUND)
  set(SYNCBN_WITH_MPI ON)
  # What a program of ours that calls MPI itself needs; the C++ bindings of MPI 2 are left out.
  add_library(syncbn_mpi_program INTERFACE)
  target_include_directories(syncbn_mpi_program SYSTEM INTERFACE ${MPI_C_INCLUDE_DIRS})
  target_compile_definitions(syncbn_mpi_program INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(syncbn_mpi_program INTERFACE syncbn::mpi ${MPI_C_LIBRARIES})
  message(STATUS "syncbn: MPI ${MPI_C_VERSION}, ${MPI_C_LIBRARIES}")
else()
  message(STATUS "syncbn: no groups over MPI (SYNCBN_MPI=${SYNCBN_MPI}: MPI 3 was not found)")
endif()

# Open MPI 4 and 5: as root, more ranks than cores, ranks that wait leave the core to others, and no
# copies between processes, which containers may forbid. Others do not look at these.
set(SYNCBN_MPI_TEST_ENVIRONMENT "\
OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1;\
PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe;OMPI_MCA_mpi_yield_when_idle=1;\
OMPI_MCA_btl_vader_single_copy_mechanism=none")

# syncbn_add_mpi_test(<name> <ranks> <target> [<argument>...]); MPIEXEC_PREFLAGS: more options of mpiexec.
function(syncbn_add_mpi_test name ranks target)
  add_test(NAME ${name} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
    ${MPIEXEC_PREFLAGS} $<TARGET_FILE:${target}> ${ARGN} ${MPIEXEC_POSTFLAGS})
  set_tests_properties(${name} PROPERTIES TIMEOUT 120 PROCESSORS 2
    ENVIRONMENT "${SYNCBN_MPI_TEST_ENVIRONMENT}")
endfunction()
