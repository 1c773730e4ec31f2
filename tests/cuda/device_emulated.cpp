// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include "device.hpp"

namespace syncbn::testing {
namespace {

std::mutex& turn() {
  static std::mutex mutex;
  return mutex;
}

/// Messages of the emulated device are memory of the host. Others have their turn meanwhile.
class EmulatedCommunicator final : public cuda::Communicator {
 public:
  explicit EmulatedCommunicator(syncbn::Communicator& host) : host_(host) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  void all_reduce_sum(std::span<const std::int64_t> in, std::span<std::int64_t> out,
                      const cuda::Stream&) override {
    std::copy(in.begin(), in.end(), out.begin());
    const Away away;
    host_.all_reduce_sum(out);
  }
  void abandon(const std::string& reason) override { host_.abandon(reason); }
  void refuse(const std::string& reason) override { host_.refuse(reason); }

 private:
  struct Away {
    Away() { turn().unlock(); }
    ~Away() { turn().lock(); }
  };
  syncbn::Communicator& host_;
};

}  // namespace

bool have_device() { return true; }
int device_cases() { return 40; }
void* device_allocate(std::size_t bytes) {  // nothing is null, as cudaMalloc has it
  return bytes == 0 ? nullptr : ::operator new(bytes, std::align_val_t{256});
}
void device_free(void* memory) { ::operator delete(memory, std::align_val_t{256}); }
void copy_to_device(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}
void copy_from_device(void* to, const void* from, std::size_t bytes) {
  copy_to_device(to, from, bytes);
}

DeviceTurn::DeviceTurn() { turn().lock(); }
DeviceTurn::~DeviceTurn() { turn().unlock(); }

std::unique_ptr<cuda::Communicator> device_communicator(Communicator& host) {
  return std::make_unique<EmulatedCommunicator>(host);
}

}  // namespace syncbn::testing
