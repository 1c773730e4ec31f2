# SPDX-License-Identifier: Apache-2.0
# The target syncbn::libtorch: syncbn/torch.hpp with LibTorch as pip installs it. It is not
# find_package(Torch), which looks for the CUDA toolkit that a wheel was built with. LIBTORCH_DIR, if
# set, is the folder of the torch package, or of an unpacked LibTorch; otherwise torch lies beside the
# Python package of syncbn, or Python knows it.
if(TARGET syncbn::libtorch)
  set(syncbn_libtorch_FOUND TRUE)
  return()
endif()
set(syncbn_libtorch_dir "${LIBTORCH_DIR}")
set(syncbn_libtorch_header include/torch/csrc/api/include/torch/torch.h)
if(NOT syncbn_libtorch_dir AND EXISTS "${CMAKE_CURRENT_LIST_DIR}/../../torch/${syncbn_libtorch_header}")
  cmake_path(SET syncbn_libtorch_dir NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../torch")
elseif(NOT syncbn_libtorch_dir)
  find_package(Python3 COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import importlib.util as u; \
s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE syncbn_libtorch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${syncbn_libtorch_dir}/${syncbn_libtorch_header}")
  set(syncbn_libtorch_FOUND FALSE)
  set(syncbn_NOT_FOUND_MESSAGE "LibTorch was not found in '${syncbn_libtorch_dir}': install torch for the \
Python that CMake finds, or set LIBTORCH_DIR")
  return()
endif()

set(syncbn_libtorch_FOUND TRUE)
add_library(syncbn::libtorch INTERFACE IMPORTED)
# gloo/ beside this file: what the header of PyTorch's Gloo backend wants to include.
target_include_directories(syncbn::libtorch SYSTEM INTERFACE
  "${syncbn_libtorch_dir}/include"
  "${syncbn_libtorch_dir}/include/torch/csrc/api/include"
  "${CMAKE_CURRENT_LIST_DIR}")
target_compile_definitions(syncbn::libtorch INTERFACE USE_C10D_GLOO)
target_link_directories(syncbn::libtorch INTERFACE "${syncbn_libtorch_dir}/lib")
target_link_libraries(syncbn::libtorch INTERFACE syncbn::syncbn torch_cpu c10)
# With CUDA, libtorch_cpu needs libraries of other wheels, which lie beside it at run time.
target_link_options(syncbn::libtorch INTERFACE
  -Wl,--allow-shlib-undefined "-Wl,-rpath,${syncbn_libtorch_dir}/lib")
