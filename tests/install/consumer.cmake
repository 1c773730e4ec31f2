# run_consumer(<option of cmake>...): configures, builds and tests this folder in ${work_dir}/build.
function(run_consumer)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_FUNCTION_LIST_DIR} -B ${work_dir}/build
    -G ${generator}
    -D CMAKE_MAKE_PROGRAM=${make_program}
    -D CMAKE_C_COMPILER=${c_compiler}
    -D CMAKE_CXX_COMPILER=${compiler}
    ${ARGN}
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${work_dir}/build --config ${config}
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_CTEST_COMMAND} --test-dir ${work_dir}/build
    --build-config ${config} --output-on-failure --no-tests=error
    COMMAND_ERROR_IS_FATAL ANY)
endfunction()
