# What SYNCBN_CUDA comes to: SYNCBN_WITH_CUDA says whether the kernels are built.
set(SYNCBN_WITH_CUDA OFF)
# Turing, Ampere, Hopper, and both kinds of Blackwell; these also as PTX, for what comes.
set(SYNCBN_CUDA_ARCHITECTURES "75-real;80-real;90-real;100;120" CACHE STRING
  "GPU architectures to build kernels for, as CMAKE_CUDA_ARCHITECTURES takes them")

if(SYNCBN_CUDA)
  find_program(SYNCBN_NVCC nvcc
    HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(SYNCBN_NVCC)
    set(SYNCBN_WITH_CUDA ON)
  elseif(NOT SYNCBN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SYNCBN_CUDA=${SYNCBN_CUDA}, but nvcc was not found: install the CUDA "
      "toolkit, put nvcc on PATH or set CUDA_HOME")
  endif()
endif()
if(NOT SYNCBN_WITH_CUDA)
  message(STATUS "syncbn: CPU only (SYNCBN_CUDA=${SYNCBN_CUDA})")
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
    "-Wall,-Wextra,-ffp-contract=off,-fvisibility=hidden,-fvisibility-inlines-hidden,"
    "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=,-ffile-prefix-map=${PROJECT_BINARY_DIR}=.")
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:
      -fmad=false               # a*b+c is fused only where the source says fma
      --expt-relaxed-constexpr  # std::numeric_limits in kernels
      -diag-suppress=554        # a conversion of a view to itself is never called
      -Xptxas=--warn-on-spills
      -Xcompiler=${host_options}>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SYNCBN_WERROR}>>:-Werror=all-warnings>)
endfunction()
