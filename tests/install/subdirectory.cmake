# SPDX-License-Identifier: Apache-2.0
# The same project with the sources in it (add_subdirectory), as one that wants static libraries, unity
# builds and optimization at link time; then what that installs. Without other optimization: that is
# quick. What was built before is built on: it is the whole library.
include(${CMAKE_CURRENT_LIST_DIR}/consumer.cmake)
file(REMOVE_RECURSE ${work_dir}/installed)
set(options -D CMAKE_BUILD_TYPE=Debug -D CMAKE_CXX_FLAGS_DEBUG=-O0 -D LIBRARY_TYPE=STATIC_LIBRARY
  -D CMAKE_UNITY_BUILD=ON -D CMAKE_INTERPROCEDURAL_OPTIMIZATION=ON)
run_consumer(${work_dir}/build ${options} -D SOURCE_DIR=${source_dir} -D BUILD_SHARED_LIBS=OFF
  -D SYNCBN_INSTALL=ON -D SYNCBN_CUDA=OFF -D SYNCBN_MPI=OFF)
run(${CMAKE_COMMAND} --install ${work_dir}/build --prefix ${work_dir}/installed --config Debug
  --component syncbn_development)
expect_installed(${work_dir}/installed libsyncbn.a LICENSE NOTICE syncbn.pc)
run_consumer(${work_dir}/build_installed ${options} -D CMAKE_PREFIX_PATH=${work_dir}/installed)

# A project without a build type: the library's targets are optimized all the same, unless the project
# says how, and the project's own are left alone. What would be compiled is enough.
function(expect_commands folder library_flags)
  file(REMOVE_RECURSE ${folder})
  run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${folder} -G ${generator}
    -D CMAKE_MAKE_PROGRAM=${make_program} -D CMAKE_C_COMPILER=${c_compiler}
    -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_EXPORT_COMPILE_COMMANDS=ON -D SOURCE_DIR=${source_dir}
    -D LIBRARY_TYPE=SHARED_LIBRARY -D SYNCBN_CUDA=OFF ${ARGN})
  file(READ ${folder}/compile_commands.json commands)
  string(JSON last LENGTH "${commands}")
  math(EXPR last "${last} - 1")
  foreach(i RANGE ${last})
    string(JSON file GET "${commands}" ${i} file)
    string(JSON command GET "${commands}" ${i} command)
    string(REGEX MATCHALL " (-O[^ ]*|-DNDEBUG)" flags "${command}")
    string(STRIP "${flags}" flags)
    string(REPLACE "; " " " flags "${flags}")
    set(expected "${library_flags}")
    if(NOT file MATCHES "^${source_dir}/src/")
      string(REGEX REPLACE " *-O3 -DNDEBUG$" "" expected "${expected}")
    endif()
    if(NOT flags STREQUAL expected)
      message(FATAL_ERROR "${file}: got '${flags}', expected '${expected}': ${command}")
    endif()
  endforeach()
endfunction()
expect_commands(${work_dir}/no_type "-O3 -DNDEBUG")
expect_commands(${work_dir}/flags "-O1" -D CMAKE_CXX_FLAGS=-O1 -D CMAKE_C_FLAGS=-O1)
expect_commands(${work_dir}/debug "" -D CMAKE_BUILD_TYPE=Debug)
