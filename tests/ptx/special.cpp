// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>

#include "grid.hpp"
#include "operations.hpp"

// Special registers of one-dimensional grids and blocks.
namespace syncbn::ptx {
namespace {

template <class F>
void fill(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint64_t* const d = written(w, i.d);
  each(mask, [&](unsigned l) { d[l] = F()(w, l); });
  define(w, i.d, mask, kAllLanes);
}
struct Thread {
  std::uint32_t operator()(const Warp& w, unsigned l) { return w.index * kLanes + l; }
};
struct BlockNumber {
  std::uint32_t operator()(const Warp& w, unsigned) { return w.block->index; }
};
struct Threads {
  std::uint32_t operator()(const Warp& w, unsigned) { return w.block->grid->launch->threads; }
};
struct Blocks {
  std::uint32_t operator()(const Warp& w, unsigned) { return w.block->grid->launch->blocks; }
};

}  // namespace

Handler special_register(const std::string& name) {
  static const std::map<std::string, Handler> kAll = {
      {"%tid.x", &fill<Thread>},
      {"%ctaid.x", &fill<BlockNumber>},
      {"%ntid.x", &fill<Threads>},
      {"%nctaid.x", &fill<Blocks>},
  };
  const auto found = kAll.find(name);
  return found == kAll.end() ? nullptr : found->second;
}

}  // namespace syncbn::ptx
