# SPDX-License-Identifier: Apache-2.0
# What SYNCBN_NCCL comes to: SYNCBN_WITH_NCCL says whether syncbn::nccl is built. NCCL_ROOT, as a
# variable or in the environment, is where include/nccl.h and lib/libnccl.so.2 are.
set(SYNCBN_WITH_NCCL OFF)
if(SKBUILD OR NOT SYNCBN_NCCL)  # in PyTorch the exchange is the process group's
  return()
endif()
set(reason "the CUDA kernels are not built")
if(SYNCBN_WITH_CUDA)
  find_path(SYNCBN_NCCL_INCLUDE_DIR nccl.h
    HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  # Python packages have the library without the linker's name for it.
  find_library(SYNCBN_NCCL_LIBRARY NAMES nccl libnccl.so.2
    HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
  set(reason "nccl.h or libnccl was not found: install NCCL or set NCCL_ROOT")
  if(SYNCBN_NCCL_INCLUDE_DIR AND SYNCBN_NCCL_LIBRARY)
    set(SYNCBN_WITH_NCCL ON)
    message(STATUS "syncbn: NCCL ${SYNCBN_NCCL_LIBRARY}")
    return()
  endif()
endif()
if(NOT SYNCBN_NCCL STREQUAL "AUTO")
  message(FATAL_ERROR "SYNCBN_NCCL=${SYNCBN_NCCL}, but ${reason}")
endif()
message(STATUS "syncbn: no groups over NCCL (SYNCBN_NCCL=AUTO: ${reason})")
