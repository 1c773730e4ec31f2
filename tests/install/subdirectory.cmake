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
