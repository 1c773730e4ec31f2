// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "decode.hpp"
#include "emulator.hpp"
#include "grid.hpp"

// Kernels of a few lines, written by hand, for tests of the interpreter.
namespace syncbn::ptx {

/// A kernel "small" with parameters p0, p1, .. of 64 bits and some registers of each type.
inline std::string small_kernel(int parameters, const std::string& body) {
  std::string text =
      ".version 9.0\n.target sm_90\n.address_size 64\n"
      ".extern .shared .align 16 .b8 dynamic[];\n.visible .entry small(\n";
  for (int i = 0; i < parameters; ++i) {
    text += std::string(i > 0 ? ",\n" : "") + ".param .u64 p" + std::to_string(i);
  }
  return text +
         "\n)\n{\n.reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<30>;\n"
         ".reg .f32 %f<9>;\n.reg .f64 %fd<9>;\n.reg .b64 %rd<30>;\n"
         "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n" +
         body + "\nret;\n}\n";
}

struct Shape {
  unsigned blocks = 1;
  unsigned threads = 32;
  std::size_t shared_bytes = 0;
};

/// Runs it; returns what the interpreter refused, or nothing.
inline std::string run_small(const std::string& text, const Shape& shape,
                             const std::vector<std::uint64_t>& arguments,
                             const Options& options = {}) {
  const Module module(text, "small.ptx");
  const auto kernel = decode(module, module.entries().at(0));
  Launch launch{kernel.get(), shape.blocks, shape.threads, shape.shared_bytes, {}};
  launch.parameters.resize(kernel->parameter_bytes);
  if (!arguments.empty()) {
    std::memcpy(launch.parameters.data(), arguments.data(), arguments.size() * 8);
  }
  try {
    run(launch, options);
  } catch (const KernelError& error) {
    return error.what();
  }
  return "";
}

inline std::uint64_t address(const void* data) { return reinterpret_cast<std::uint64_t>(data); }

}  // namespace syncbn::ptx
