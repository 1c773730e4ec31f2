# Says what SYNCBN_CUDA comes to. There are no CUDA kernels yet, so every build is CPU only.
if(NOT SYNCBN_CUDA)
  message(STATUS "syncbn: CPU only (SYNCBN_CUDA=${SYNCBN_CUDA})")
else()
  find_program(SYNCBN_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(SYNCBN_NVCC)
    message(STATUS "syncbn: found ${SYNCBN_NVCC}, but there are no CUDA kernels yet: CPU only")
  elseif(SYNCBN_CUDA STREQUAL "AUTO")
    message(STATUS "syncbn: CUDA not found: CPU only")
  else()
    message(FATAL_ERROR "SYNCBN_CUDA=${SYNCBN_CUDA}, but nvcc was not found: install the CUDA "
      "toolkit, put nvcc on PATH or set CUDA_HOME")
  endif()
endif()
set(SYNCBN_WITH_CUDA OFF)
