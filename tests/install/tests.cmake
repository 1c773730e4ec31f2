# SPDX-License-Identifier: Apache-2.0
# The tests of this folder; the projects in it are not part of the build.
get_target_property(type syncbn TYPE)
if(NOT type STREQUAL "SHARED_LIBRARY")
  return()
endif()
enable_language(C)
find_program(SYNCBN_PKG_CONFIG NAMES pkg-config pkgconf)
set(work_dir ${CMAKE_CURRENT_BINARY_DIR}/install)
set(options
  -D build_dir=${PROJECT_BINARY_DIR}
  -D source_dir=${PROJECT_SOURCE_DIR}
  -D prefix=${work_dir}/installed/moved
  -D generator=${CMAKE_GENERATOR}
  -D make_program=${CMAKE_MAKE_PROGRAM}
  -D c_compiler=${CMAKE_C_COMPILER}
  -D compiler=${CMAKE_CXX_COMPILER}
  -D config=$<CONFIG>
  -D mpi=${SYNCBN_WITH_MPI}
  -D pkg_config=${SYNCBN_PKG_CONFIG}
  -D version=${PROJECT_VERSION})
foreach(test IN ITEMS installed subdirectory pkg_config)
  if(test STREQUAL "pkg_config" AND NOT SYNCBN_PKG_CONFIG)
    add_test(NAME install.${test} COMMAND ${CMAKE_COMMAND} -E echo
      "skipped: pkg-config was not found")
    set_tests_properties(install.${test} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped:")
  else()
    add_test(NAME install.${test} COMMAND ${CMAKE_COMMAND} -D work_dir=${work_dir}/${test} ${options}
      -P ${CMAKE_CURRENT_LIST_DIR}/${test}.cmake)
  endif()
endforeach()
set_tests_properties(install.installed PROPERTIES FIXTURES_SETUP moved)
set_tests_properties(install.pkg_config PROPERTIES FIXTURES_REQUIRED moved)
