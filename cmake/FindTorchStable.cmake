# SPDX-License-Identifier: Apache-2.0
# Finds the headers and the library of PyTorch's stable ABI: target torch::stable.
# Not find_package(Torch): that one enables CUDA by itself and pulls in the whole C++ API.
# SYNCBN_TORCH_DIR, if set, is the folder of the torch package.
set(TorchStable_DIR "${SYNCBN_TORCH_DIR}")
if(NOT TorchStable_DIR)
  find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
  # -I first: it looks past the overlay of pip's build isolation, which hides torch.
  foreach(flag IN ITEMS -I -B)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} ${flag} -c "import importlib.util as u; \
s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE TorchStable_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    if(TorchStable_DIR)
      break()
    endif()
  endforeach()
endif()

# Plain variables, nothing cached: the interpreter may be another one at the next configure.
set(TorchStable_LIBRARY
  "${TorchStable_DIR}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
set(TorchStable_VERSION "")
if(EXISTS "${TorchStable_LIBRARY}" AND EXISTS "${TorchStable_DIR}/version.py")
  file(STRINGS "${TorchStable_DIR}/version.py" TorchStable_VERSION REGEX "^__version__ *=")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TorchStable_VERSION "${TorchStable_VERSION}")
endif()
if(NOT TorchStable_VERSION)
  message(FATAL_ERROR "PyTorch was not found: install torch ${TorchStable_FIND_VERSION} or newer "
    "for ${Python3_EXECUTABLE}, or set SYNCBN_TORCH_DIR to the folder of the torch package")
elseif(TorchStable_VERSION VERSION_LESS TorchStable_FIND_VERSION)
  message(FATAL_ERROR "PyTorch ${TorchStable_VERSION} in ${TorchStable_DIR} is too old: "
    "${TorchStable_FIND_VERSION} or newer is needed")
endif()
# The CUDA version of that PyTorch, empty if it is for CPU only.
file(STRINGS "${TorchStable_DIR}/version.py" TorchStable_CUDA_VERSION REGEX "^cuda[ :=]")
string(REGEX MATCH "[0-9]+\\.[0-9]+" TorchStable_CUDA_VERSION "${TorchStable_CUDA_VERSION}")
message(STATUS "syncbn: PyTorch ${TorchStable_VERSION} (CUDA: ${TorchStable_CUDA_VERSION})")

set(TorchStable_FOUND TRUE)
if(NOT TARGET torch::stable)
  add_library(torch::stable SHARED IMPORTED)
  set_target_properties(torch::stable PROPERTIES
    IMPORTED_LOCATION "${TorchStable_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${TorchStable_DIR}/include"
    INTERFACE_COMPILE_DEFINITIONS TORCH_TARGET_VERSION=0x020b000000000000  # 2.11, the floor
    INTERFACE_COMPILE_OPTIONS "-ffile-prefix-map=${TorchStable_DIR}/include/=")
endif()
if(TorchStable_CUDA_VERSION AND NOT TARGET torch::stable_cuda)
  add_library(torch::stable_cuda SHARED IMPORTED)
  string(REPLACE "torch_cpu" "torch_cuda" cuda_library "${TorchStable_LIBRARY}")
  set_target_properties(torch::stable_cuda PROPERTIES
    IMPORTED_LOCATION "${cuda_library}"
    INTERFACE_LINK_LIBRARIES torch::stable
    INTERFACE_COMPILE_DEFINITIONS USE_CUDA)
endif()
