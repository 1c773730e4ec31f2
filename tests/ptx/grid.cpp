// SPDX-License-Identifier: Apache-2.0
#include "grid.hpp"

#include <numeric>
#include <string>
#include <utility>

#include "runner.hpp"

namespace syncbn::ptx {
namespace {

/// A device, and the launch that it is at.
class Device {
 public:
  Device(Machine& machine, std::uint64_t number, std::span<const Launch> launches,
         const Options& options)
      : machine_(machine), number_(number), launches_(launches), options_(options) {}

  /// Lets some warp run that does not rest, of some block that does not. False: there is none.
  bool step() {
    if (resident_.empty()) {
      return false;
    }
    const std::size_t first = machine_.random.below(resident_.size());
    for (std::size_t i = 0; i < resident_.size(); ++i) {
      Block& block = *resident_[(first + i) % resident_.size()];
      const std::size_t warps = block.warps.size();
      const std::size_t first_warp = machine_.random.below(warps);
      for (std::size_t w = 0; w < warps && block.rests_until <= machine_.steps; ++w) {
        Warp& warp = block.warps[(first_warp + w) % warps];
        if (warp.rests_until <= machine_.steps && ptx::step(*grid_, warp)) {
          return true;
        }
      }
    }
    return false;
  }
  bool killed() const {
    const emulation::Settings& settings = emulation::settings();
    return static_cast<int>(number_) == settings.killed && machine_.steps > settings.killed_after;
  }
  void wake() {
    for (const auto& block : resident_) {
      block->rests_until = 0;
      for (Warp& warp : block->warps) {
        warp.rests_until = 0;
      }
    }
  }
  /// Ends a block that is done, and begins others, and other launches. False: all is done.
  template <class Done>
  bool supply(const Done& done) {
    for (std::size_t i = 0; i < resident_.size(); ++i) {
      if (resident_[i]->live == 0) {
        end_block(*grid_, *resident_[i]);
        resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
    if (grid_.has_value() && resident_.empty() && next_ == order_.size()) {
      done(*grid_->launch, std::move(grid_->execution));
      known_ = std::move(grid_->known);
      grid_.reset();
      launches_ = launches_.subspan(1);
    }
    if (!grid_.has_value()) {
      if (launches_.empty()) {
        return false;
      }
      begin(launches_.front());
    }
    const bool together = !machine_.alone;
    while (next_ < order_.size() && (together || resident_.size() < options_.resident)) {
      resident_.push_back(start_block(*grid_, order_[next_++]));
    }
    return true;
  }
  void list_blocks(std::vector<const Block*>& out) const {
    for (const auto& block : resident_) {
      out.push_back(block.get());
    }
  }

 private:
  void begin(const Launch& launch) {
    grid_.emplace(Grid{.launch = &launch,
                       .options = options_,
                       .machine = machine_,
                       .device = number_,
                       .execution = {},
                       .known = known_});
    grid_->execution.counts.resize(options_.counts ? launch.program->blocks.size() : 0);
    const unsigned last = options_.last_blocks;
    const unsigned skipped = last == 0 || last > launch.blocks ? 0 : launch.blocks - last;
    order_.resize(launch.blocks - skipped);
    std::iota(order_.begin(), order_.end(), skipped);
    machine_.random.shuffle(order_);
    next_ = 0;
  }

  Machine& machine_;
  std::uint64_t number_;
  std::span<const Launch> launches_;
  Options options_;
  std::optional<Grid> grid_;
  std::vector<unsigned> order_;
  std::size_t next_ = 0;
  std::vector<std::unique_ptr<Block>> resident_;
  View known_;
};

using Done = std::function<void(const Launch&, Execution)>;

void run_all(Machine& machine, std::vector<std::unique_ptr<Device>> devices, const Done& done) {
  // Some device that can go on; one that has ended is taken out.
  const auto step = [&] {
    const std::size_t first = devices.size() < 2 ? 0 : machine.random.below(devices.size());
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (devices[(first + i) % devices.size()]->step()) {
        return true;
      }
    }
    return false;
  };
  while (true) {
    std::erase_if(devices, [&](const auto& one) { return one->killed() || !one->supply(done); });
    if (devices.empty()) {
      break;
    }
    ++machine.steps;
    emulation::tick();
    if (!step()) {
      for (const auto& one : devices) {
        one->wake();
      }
      if (!step()) {
        std::vector<const Block*> blocks;
        for (const auto& one : devices) {
          one->list_blocks(blocks);
        }
        report_deadlock(blocks);
      }
    }
    if (machine.weak.has_value()) {
      machine.weak->pause();
    }
  }
  if (machine.weak.has_value()) {
    machine.weak->settle();
  }
}

}  // namespace

Execution run(const Launch& launch, const Options& options) {
  Machine machine(options.seed);
  if (options.weak) {
    machine.weak.emplace(options.seed);
  }
  std::vector<std::unique_ptr<Device>> alone;
  alone.push_back(std::make_unique<Device>(machine, 0, std::span(&launch, 1), options));
  Execution out;
  run_all(machine, std::move(alone),
          [&](const Launch&, Execution execution) { out = std::move(execution); });
  return out;
}

void run_devices(const std::vector<std::vector<Launch>>& devices, const Options& options,
                 const Done& done) {
  Machine machine(options.seed);
  machine.alone = false;
  if (options.weak) {
    machine.weak.emplace(options.seed);
  }
  std::vector<std::unique_ptr<Device>> all;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    all.push_back(std::make_unique<Device>(machine, i, devices[i], options));
  }
  run_all(machine, std::move(all), done);
}

}  // namespace syncbn::ptx
