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
struct Lane {
  std::uint32_t operator()(const Warp&, unsigned l) { return l; }
};
struct WarpNumber {
  std::uint32_t operator()(const Warp& w, unsigned) { return w.index; }
};
struct Zero {
  std::uint32_t operator()(const Warp&, unsigned) { return 0; }
};
struct One {
  std::uint32_t operator()(const Warp&, unsigned) { return 1; }
};
struct WarpSize {
  std::uint32_t operator()(const Warp&, unsigned) { return kLanes; }
};
struct Equal {
  std::uint32_t operator()(const Warp&, unsigned l) { return 1u << l; }
};
struct Below {
  std::uint32_t operator()(const Warp&, unsigned l) { return (1u << l) - 1; }
};
struct UpTo {
  std::uint32_t operator()(const Warp&, unsigned l) { return (2u << l) - 1; }
};
struct Above {
  std::uint32_t operator()(const Warp&, unsigned l) { return ~((2u << l) - 1); }
};
struct From {
  std::uint32_t operator()(const Warp&, unsigned l) { return ~((1u << l) - 1); }
};
struct DynamicShared {
  std::uint32_t operator()(const Warp& w, unsigned) {
    return static_cast<std::uint32_t>(w.block->grid->launch->shared_bytes);
  }
};
struct TotalShared {
  std::uint32_t operator()(const Warp& w, unsigned) {
    return static_cast<std::uint32_t>(w.block->shared.size());
  }
};

}  // namespace

Handler special_register(const std::string& name) {
  static const std::map<std::string, Handler> kAll = {
      {"%tid.x", &fill<Thread>},
      {"%ctaid.x", &fill<BlockNumber>},
      {"%ntid.x", &fill<Threads>},
      {"%nctaid.x", &fill<Blocks>},
      {"%laneid", &fill<Lane>},
      {"%warpid", &fill<WarpNumber>},
      {"%tid.y", &fill<Zero>},
      {"%tid.z", &fill<Zero>},
      {"%ctaid.y", &fill<Zero>},
      {"%ctaid.z", &fill<Zero>},
      {"%ntid.y", &fill<One>},
      {"%ntid.z", &fill<One>},
      {"%nctaid.y", &fill<One>},
      {"%nctaid.z", &fill<One>},
      {"%lanemask_eq", &fill<Equal>},
      {"%lanemask_lt", &fill<Below>},
      {"%lanemask_le", &fill<UpTo>},
      {"%lanemask_gt", &fill<Above>},
      {"%lanemask_ge", &fill<From>},
      {"%dynamic_smem_size", &fill<DynamicShared>},
      {"%total_smem_size", &fill<TotalShared>},
      {"WARP_SZ", &fill<WarpSize>},
  };
  const auto found = kAll.find(name);
  return found == kAll.end() ? nullptr : found->second;
}

}  // namespace syncbn::ptx
