# SPDX-License-Identifier: Apache-2.0
# What is installed, by component: syncbn_runtime, syncbn_development, syncbn_mpi and syncbn_nccl.
include(CMakePackageConfigHelpers)
if(SKBUILD)
  set(library_dir syncbn/lib)
  set(config_dir syncbn/cmake)
else()
  set(library_dir ${CMAKE_INSTALL_LIBDIR})
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/syncbn)
endif()

# syncbn_install_library(<target> <exported as> <runtime component> <development component>)
function(syncbn_install_library target export runtime development)
  install(TARGETS ${target} EXPORT ${export}-targets
    LIBRARY DESTINATION ${library_dir} COMPONENT ${runtime} NAMELINK_COMPONENT ${development}
    ARCHIVE DESTINATION ${library_dir} COMPONENT ${development})
  install(EXPORT ${export}-targets NAMESPACE syncbn:: DESTINATION ${config_dir}
    COMPONENT ${development})
endfunction()

syncbn_install_library(syncbn syncbn syncbn_runtime syncbn_development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/syncbn ${PROJECT_SOURCE_DIR}/bindings/libtorch/syncbn
  DESTINATION ${include_dir} COMPONENT syncbn_development)
set(SYNCBN_NEEDS_CUDART OFF)
if(SYNCBN_WITH_CUDA AND library_type STREQUAL "STATIC")
  set(SYNCBN_NEEDS_CUDART ON)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/syncbn-config.cmake.in
  syncbn-config.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(syncbn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/syncbn-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/syncbn-config-version.cmake
  DESTINATION ${config_dir} COMPONENT syncbn_development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/bindings/libtorch/cmake/
  DESTINATION ${config_dir} COMPONENT syncbn_development)
if(SKBUILD)
  return()
endif()
# With whatever is installed first: a copy of the library goes with its licence.
foreach(component IN ITEMS syncbn_runtime syncbn_development)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE
    DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/licenses/syncbn COMPONENT ${component})
endforeach()

# What a C program has to link besides a static library, which is of C++.
set(more_libraries)
if(library_type STREQUAL "STATIC")
  set(more_libraries "-lstdc++ -lm -pthread")
  if(SYNCBN_WITH_CUDA)
    string(PREPEND more_libraries "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
  endif()
endif()
# syncbn_pkg_config(<name> <library> <description> <component> <more_libraries> [<required module>])
function(syncbn_pkg_config name library description component more_libraries)
  set(requires ${ARGN})
  file(RELATIVE_PATH to_prefix /prefix/${library_dir}/pkgconfig /prefix)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/syncbn.pc.in ${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${library_dir}/pkgconfig
    COMPONENT ${component})
endfunction()
syncbn_pkg_config(syncbn syncbn "${PROJECT_DESCRIPTION}" syncbn_development "${more_libraries}")

# syncbn_install_group(<name> <libraries of a static one>)
function(syncbn_install_group name libraries)
  syncbn_install_library(syncbn_${name} syncbn-${name} syncbn_${name} syncbn_${name})
  set(more_libraries)
  if(library_type STREQUAL "STATIC")
    list(JOIN libraries " " more_libraries)
  endif()
  string(TOUPPER ${name} engine)
  syncbn_pkg_config(syncbn-${name} syncbn_${name} "Groups of syncbn over ${engine}" syncbn_${name}
    "${more_libraries}" syncbn)
endfunction()
if(SYNCBN_WITH_NCCL)
  syncbn_install_group(nccl "${SYNCBN_NCCL_LIBRARY}")
endif()
if(SYNCBN_WITH_MPI)
  syncbn_install_group(mpi "${MPI_C_LIBRARIES}")
endif()
