# SPDX-License-Identifier: Apache-2.0
# Cross-compiles for macOS on Apple's processors with Zig, which brings the system's headers (make macos).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_CXX_COMPILER python-zig;c++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-macos)
