# Installs the build, moves the result, and builds and runs a project that uses it from there.
set(first ${work_dir}/installed)
set(prefix ${work_dir}/moved)
file(REMOVE_RECURSE ${work_dir})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${first} --config ${config})
file(RENAME ${first} ${prefix})

# The headers are those of include/syncbn and bindings/libtorch; nothing of src/ and no test is installed.
file(GLOB_RECURSE headers RELATIVE ${prefix}/include ${prefix}/include/*)
list(FILTER headers EXCLUDE REGEX "^syncbn/[a-z0-9_]+\\.(h|hpp)$")
if(headers)
  message(FATAL_ERROR "unexpected headers installed: ${headers}")
endif()

include(${CMAKE_CURRENT_LIST_DIR}/consumer.cmake)
run_consumer(-D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_BUILD_TYPE=${config} -D MPI=${mpi})
