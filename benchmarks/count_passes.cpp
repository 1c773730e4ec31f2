// SPDX-License-Identifier: Apache-2.0
// Runs each pass once under callgrind, which counts its instructions: benchmarks/count.py calls it.
//
// valgrind --tool=callgrind --collect-atstart=no count_passes
//
// One thread. Each pass has run before it is counted, so that what is made once (windows' hints,
// allocations of the first call) is there. One profile per pass is dumped, named
// "pass|shape|dtype|layout".
#include <valgrind/callgrind.h>

#include <cstdio>
#include <string>

#include "layer_passes.hpp"

namespace {

using syncbn::DType;

constexpr const char* kShapes[] = {"4x64x28x28", "4x64x14x14", "4x64x7x7", "256x64"};

void count(const std::string& shape, DType dtype, bool channels_last) {
  syncbn::bench::LayerPasses layer(syncbn::bench::parse_shape(shape), dtype, channels_last);
  const std::string what =
      "|" + shape + "|" + syncbn::name(dtype) + (channels_last ? "|channels-last" : "|contiguous");
  const syncbn::bench::Pages out(layer.bytes());
  const auto all = [&](const auto& hook) {
    layer.forward(out.data(), syncbn::serial_executor(), hook);
    layer.backward(out.data(), syncbn::serial_executor(), hook);
    layer.variants(out.data(), syncbn::serial_executor(), hook);
  };
  layer.check(syncbn::serial_executor());
  all([](const char*, const auto& pass) { pass(); });
  all([&](const char* name, const auto& pass) {
    const std::string label = name + what;
    CALLGRIND_TOGGLE_COLLECT;
    pass();
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(label.c_str());
  });
}

}  // namespace

int main() {
  std::printf("%s\n%s\n", SYNCBN_BUILD, syncbn::cpu_instruction_set());
  for (const char* shape : kShapes) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool channels_last : {false, true}) {
        const bool planes = std::string(shape) != "256x64";
        if (planes || !channels_last) {
          count(shape, dtype, channels_last);
        }
      }
    }
  }
}
