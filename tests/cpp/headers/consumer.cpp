// SPDX-License-Identifier: Apache-2.0
// A program without exceptions compiles with every header of the library. Nobody runs it.
#include "syncbn/c_api.h"
#include "syncbn/mpi.hpp"
#include "syncbn/mpi_c_api.h"
#include "syncbn/nccl.hpp"
#include "syncbn/syncbn.hpp"

std::size_t step(const float* values, std::size_t count) {
  const std::span<const float> x(values, count);
  std::vector<float> y(count);
  const syncbn::Extents shape = {static_cast<std::int64_t>(count), 1};
  syncbn::BatchNorm layer({.channels = 1, .name = "bn"}, syncbn::self_communicator());
  syncbn::Saved saved;
  layer.forward({.x = {x, shape}, .y = {y, shape}}, saved);
  return saved.mean().size() + syncbn::size_of(syncbn::DType::kFloat16);
}
