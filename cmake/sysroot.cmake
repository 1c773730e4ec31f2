# SPDX-License-Identifier: Apache-2.0
# Compiles with this system's g++ for the C library in build/sysroot (make wheel-old). What the C++
# library there lacks comes from the compiler's own, and is linked statically.
set(sysroot ${CMAKE_CURRENT_LIST_DIR}/../build/sysroot)
set(CMAKE_CXX_FLAGS_INIT --sysroot=${sysroot})
set(CMAKE_CUDA_FLAGS_INIT -Xcompiler=--sysroot=${sysroot})
# -B finds libraries and start files. With newer start files a program would run no constructors.
foreach(kind IN ITEMS EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT -B${sysroot}/usr/lib/x86_64-linux-gnu)
endforeach()
foreach(language IN ITEMS CXX CUDA)
  set(CMAKE_${language}_STANDARD_LIBRARIES "-lsstream -lstdc++ -l:libstdc++.a")
endforeach()
