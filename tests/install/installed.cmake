# SPDX-License-Identifier: Apache-2.0
# Installs the build, moves the result, and builds and runs a project that uses it from there.
set(first ${work_dir}/installed)
set(prefix ${work_dir}/moved)
file(REMOVE_RECURSE ${work_dir})

include(${CMAKE_CURRENT_LIST_DIR}/consumer.cmake)

run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${first} --config ${config})
file(RENAME ${first} ${prefix})

# The headers are those of include/syncbn and bindings/libtorch; nothing of src/ and no test is installed.
file(GLOB_RECURSE headers RELATIVE ${prefix}/include ${prefix}/include/*)
list(FILTER headers EXCLUDE REGEX "^syncbn/[a-z0-9_]+\\.(h|hpp)$")
if(headers)
  message(FATAL_ERROR "unexpected headers installed: ${headers}")
endif()

# A component is what its user needs: who runs a program, the library and its licence alone.
run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/runtime --config ${config}
  --component syncbn_runtime)
file(GLOB_RECURSE files RELATIVE ${work_dir}/runtime ${work_dir}/runtime/*)
list(FILTER files EXCLUDE REGEX "^lib[^/]*/([^/]+/)?libsyncbn\\.so\\.[0-9.]+$|^share/licenses/syncbn/(LICENSE|NOTICE)$")
if(files)
  message(FATAL_ERROR "unexpected files of syncbn_runtime: ${files}")
endif()
expect_installed(${work_dir}/runtime libsyncbn.so.* LICENSE NOTICE)

run_consumer(${work_dir}/build -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_BUILD_TYPE=${config}
  -D MPI=${mpi} -D LIBRARY_TYPE=SHARED_LIBRARY)
