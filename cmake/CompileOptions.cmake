# SPDX-License-Identifier: Apache-2.0
# A project around this one may have no build type, and nothing else that says how to optimize. Then the
# targets of this one alone are compiled as for Release: kernels without optimization take 15 times as long.
get_directory_property(given_options COMPILE_OPTIONS)
set(syncbn_optimize OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES
    AND NOT "${CMAKE_CXX_FLAGS} ${given_options}" MATCHES "(^|[ ;:>])-O")
  set(syncbn_optimize ON)
endif()

# syncbn_compile_options(<target>...): what every target of this project is compiled with.
function(syncbn_compile_options)
  foreach(target IN LISTS ARGN)
    set_target_properties(${target} PROPERTIES
      CXX_STANDARD 20
      CXX_STANDARD_REQUIRED ON
      CXX_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
      # Whatever the project around this one prefers: names in unnamed namespaces repeat from file to
      # file, and code for one instruction set must not be merged with that of others.
      UNITY_BUILD OFF
      INTERPROCEDURAL_OPTIMIZATION OFF)
    set(options
      -Wall -Wextra -Wconversion
      -Werror=switch  # who adds a dtype or an activation is told all places that need it
      $<$<BOOL:${SYNCBN_WERROR}>:-Werror>
      # The same bits from every compiler: a*b+c is fused only where the source says fma.
      -ffp-contract=off
      # No path of the build machine in the binaries.
      -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=
      -ffile-prefix-map=${PROJECT_BINARY_DIR}=.)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${options}>")
    if(syncbn_optimize)
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX,CUDA>:-O3;-DNDEBUG>")
    endif()
    if(SYNCBN_SANITIZE)
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:\
-fsanitize=${SYNCBN_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
      target_link_options(${target} PRIVATE -fsanitize=${SYNCBN_SANITIZE})
    endif()
  endforeach()
endfunction()

# syncbn_limit_exports(<library>): it exports only what exports.map lists, and leaves nothing open.
function(syncbn_limit_exports target)
  set(map ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(${target} PRIVATE LINKER:--version-script=${map})
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
  if(NOT SYNCBN_SANITIZE)  # the executable brings the sanitizer's symbols
    target_link_options(${target} PRIVATE LINKER:--no-undefined)
  endif()
endfunction()
