# SPDX-License-Identifier: Apache-2.0
# GTest::gtest_main from the system, else from its repository at a fixed commit.
find_package(GTest 1.12 CONFIG QUIET)
if(GTest_FOUND)
  message(STATUS "syncbn: GoogleTest ${GTest_VERSION} from ${GTest_DIR}")
  return()
endif()

include(FetchContent)
if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
  set(repository https://github.com/google/googletest.git)
  set(commit 52eb8108c5bdec04579160ae17225d66034bd723)  # v1.17.0
  set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST ${PROJECT_BINARY_DIR}/googletest-${commit})
  if(NOT EXISTS ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST}/CMakeLists.txt)
    find_program(SYNCBN_GIT git)
    message(STATUS "syncbn: GoogleTest from ${repository}")
    # By hand, for one clear line without a network; the commit's hash is what git verifies.
    set(status 1)
    if(SYNCBN_GIT)
      execute_process(
        COMMAND ${SYNCBN_GIT} init -q ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST}
        COMMAND_ERROR_IS_FATAL ANY)
      execute_process(
        COMMAND ${SYNCBN_GIT} fetch -q --depth 1 ${repository} ${commit}
        WORKING_DIRECTORY ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST}
        RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET TIMEOUT 120)
    endif()
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "GoogleTest 1.12 or newer was not found and could not be fetched: "
        "install it (Debian and Ubuntu: libgtest-dev) or go online")
    endif()
    execute_process(
      COMMAND ${SYNCBN_GIT} checkout -q ${commit}
      WORKING_DIRECTORY ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST}
      COMMAND_ERROR_IS_FATAL ANY)
  endif()
endif()
set(BUILD_GMOCK OFF)
set(INSTALL_GTEST OFF)
FetchContent_Declare(googletest SYSTEM SOURCE_DIR ${FETCHCONTENT_SOURCE_DIR_GOOGLETEST})
FetchContent_MakeAvailable(googletest)
