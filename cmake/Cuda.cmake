# SPDX-License-Identifier: Apache-2.0
# What SYNCBN_CUDA comes to: SYNCBN_WITH_CUDA says whether the kernels are built. AUTO: where nvcc and
# a GPU's driver are found, because kernels take minutes to compile. In a wheel, where only PyTorch
# calls them, nvcc must be of PyTorch's major version of CUDA, and know the architectures below (12.8).
set(SYNCBN_WITH_CUDA OFF)
# Turing, Ampere, Hopper, and both kinds of Blackwell; these also as PTX, for what comes.
set(SYNCBN_CUDA_ARCHITECTURES "75-real;80-real;90-real;100;120" CACHE STRING
  "GPU architectures to build kernels for, as CMAKE_CUDA_ARCHITECTURES takes them")

set(reason "nvcc was not found")
if(CMAKE_CROSSCOMPILING AND SYNCBN_CUDA STREQUAL "AUTO")
  set(reason "this is a cross-compilation; ON takes nvcc nevertheless")
elseif(SYNCBN_CUDA STREQUAL "AUTO" AND NOT EXISTS /proc/driver/nvidia/version
    AND NOT EXISTS /dev/dxg)  # the latter in WSL
  set(reason "there is no GPU's driver here; ON builds the kernels nevertheless")
elseif(SYNCBN_CUDA)
  find_program(SYNCBN_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(SYNCBN_NVCC)
    set(SYNCBN_WITH_CUDA ON)
    if(SKBUILD AND SYNCBN_CUDA STREQUAL "AUTO")
      execute_process(COMMAND ${SYNCBN_NVCC} --version OUTPUT_VARIABLE nvcc_version)
      string(REGEX REPLACE ".*release ([0-9.]+).*" "\\1" nvcc_version "${nvcc_version}")
      string(REGEX MATCH "^[0-9]+\\." nvcc_major "${nvcc_version}")
      string(FIND "${TorchStable_CUDA_VERSION}" "${nvcc_major}" at)
      if(NOT at EQUAL 0 OR nvcc_version VERSION_LESS 12.8)
        set(SYNCBN_WITH_CUDA OFF)
        set(reason "nvcc is of CUDA ${nvcc_version}, PyTorch of '${TorchStable_CUDA_VERSION}'")
      endif()
    endif()
  elseif(NOT SYNCBN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SYNCBN_CUDA=${SYNCBN_CUDA}, but nvcc was not found: install the CUDA "
      "toolkit, put nvcc on PATH or set CUDA_HOME")
  endif()
endif()
if(NOT SYNCBN_WITH_CUDA)
  if(NOT SYNCBN_CUDA)
    set(reason "as asked")
  endif()
  message(STATUS "syncbn: CPU only (SYNCBN_CUDA=${SYNCBN_CUDA}: ${reason})")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${SYNCBN_NVCC})
set(CMAKE_CUDA_ARCHITECTURES ${SYNCBN_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know it for nvcc 12
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
message(STATUS "syncbn: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${SYNCBN_CUDA_ARCHITECTURES}")

# syncbn_cuda_options(<target>): what kernels are compiled with.
function(syncbn_cuda_options target)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20
    CUDA_STANDARD_REQUIRED ON
    CUDA_EXTENSIONS OFF
    CUDA_VISIBILITY_PRESET hidden)
  string(CONCAT host_options
    "-Wall,-Wextra,-Werror=switch,-ffp-contract=off,-fvisibility=hidden,-fvisibility-inlines-hidden,"
    "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=,-ffile-prefix-map=${PROJECT_BINARY_DIR}=.")
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:
      -fmad=false               # a*b+c is fused only where the source says fma
      --expt-relaxed-constexpr  # std::numeric_limits in kernels
      -diag-suppress=554        # a conversion of a view to itself is never called
      -Xptxas=--warn-on-spills
      # By default machine code is not compressed; with CUDA 12 the mode would want a newer driver.
      $<IF:$<VERSION_GREATER_EQUAL:${CMAKE_CUDA_COMPILER_VERSION},13>,--compress-mode=size,-Xfatbin=-compress-all>
      -Xcompiler=${host_options}>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SYNCBN_WERROR}>>:-Werror=all-warnings>)
endfunction()
