# SPDX-License-Identifier: Apache-2.0
# LibTorch as pip installs it, by hand: target libtorch. Not find_package(Torch), which looks for
# the CUDA toolkit that a wheel was built with. LIBTORCH_DIR, if set, is the folder of the torch
# package, or of an unpacked LibTorch.
if(NOT LIBTORCH_DIR)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import importlib.util as u; \
s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE LIBTORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT EXISTS "${LIBTORCH_DIR}/include/torch/csrc/api/include/torch/torch.h")
  message(FATAL_ERROR "LibTorch was not found in '${LIBTORCH_DIR}': install torch for "
    "${Python3_EXECUTABLE}, or set LIBTORCH_DIR")
endif()

add_library(libtorch INTERFACE)
# gloo/ beside this file: what the header of PyTorch's Gloo backend wants to include.
target_include_directories(libtorch SYSTEM INTERFACE
  ${LIBTORCH_DIR}/include
  ${LIBTORCH_DIR}/include/torch/csrc/api/include
  ${CMAKE_CURRENT_LIST_DIR})
target_compile_definitions(libtorch INTERFACE USE_C10D_GLOO)
target_link_directories(libtorch INTERFACE ${LIBTORCH_DIR}/lib)
target_link_libraries(libtorch INTERFACE torch_cpu c10)
# With CUDA, libtorch_cpu needs libraries of other wheels, which lie beside it at run time.
target_link_options(libtorch INTERFACE -Wl,--allow-shlib-undefined -Wl,-rpath,${LIBTORCH_DIR}/lib)
