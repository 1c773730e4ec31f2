# The same project with the sources in it (add_subdirectory). Without optimization: that is quick.
file(REMOVE_RECURSE ${work_dir})
include(${CMAKE_CURRENT_LIST_DIR}/consumer.cmake)
run_consumer(-D SOURCE_DIR=${source_dir} -D SYNCBN_CUDA=OFF -D SYNCBN_MPI=OFF
  -D CMAKE_BUILD_TYPE=Debug -D CMAKE_CXX_FLAGS_DEBUG=-O0)
