# SPDX-License-Identifier: Apache-2.0
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# run_consumer(<folder> <option of cmake>...): configures, builds and tests this folder in <folder>.
function(run_consumer folder)
  run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_FUNCTION_LIST_DIR} -B ${folder}
    -G ${generator}
    -D CMAKE_MAKE_PROGRAM=${make_program}
    -D CMAKE_C_COMPILER=${c_compiler}
    -D CMAKE_CXX_COMPILER=${compiler}
    ${ARGN})
  run(${CMAKE_COMMAND} --build ${folder} --config ${config})
  run(${CMAKE_CTEST_COMMAND} --test-dir ${folder}
    --build-config ${config} --output-on-failure --no-tests=error)
endfunction()

# expect_installed(<folder> <glob>...): each pattern matches something there.
function(expect_installed folder)
  foreach(pattern IN LISTS ARGN)
    file(GLOB_RECURSE found ${folder}/${pattern})
    if(NOT found)
      message(FATAL_ERROR "${pattern} was not installed in ${folder}")
    endif()
  endforeach()
endfunction()
