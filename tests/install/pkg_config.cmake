# SPDX-License-Identifier: Apache-2.0
# Compiles a C program with what pkg-config says of the package that install.installed moved, and a
# program of MPI with the line of docs/cpp_guide.md.
file(GLOB_RECURSE files ${prefix}/*.pc)
list(GET files 0 file)
cmake_path(GET file PARENT_PATH folder)
set(ENV{PKG_CONFIG_PATH} ${folder})
set(modules syncbn)
if(mpi)
  list(APPEND modules syncbn-mpi)
endif()
foreach(module IN LISTS modules)
  execute_process(COMMAND ${pkg_config} --modversion ${module}
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT found STREQUAL version)
    message(FATAL_ERROR "${module}: got version ${found}, expected ${version}")
  endif()
  execute_process(COMMAND ${pkg_config} --cflags --libs ${module}
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  set(program ${work_dir}/${module})
  file(MAKE_DIRECTORY ${work_dir})
  if(module STREQUAL "syncbn")
    set(compile ${c_compiler} -std=c99 ${CMAKE_CURRENT_LIST_DIR}/main.c)
  else()
    set(compile ${compiler} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/mpi.cpp)
  endif()
  execute_process(COMMAND ${compile} ${flags} -o ${program} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${folder}/.. ${program}
    COMMAND_ERROR_IS_FATAL ANY)
endforeach()

find_program(mpicxx mpicxx)
if(mpi AND mpicxx)
  file(READ ${source_dir}/docs/cpp_guide.md page)
  string(REGEX MATCH "`(mpicxx [^`]*)`" line "${page}")
  if(NOT line)
    message(FATAL_ERROR "docs/cpp_guide.md has no line of mpicxx")
  endif()
  file(COPY_FILE ${source_dir}/examples/15_mpi.cpp ${work_dir}/main.cpp)
  set(ENV{OMPI_CXX} ${compiler})
  set(ENV{MPICH_CXX} ${compiler})
  execute_process(COMMAND sh -c "${CMAKE_MATCH_1}" WORKING_DIRECTORY ${work_dir}
    COMMAND_ERROR_IS_FATAL ANY)
endif()
