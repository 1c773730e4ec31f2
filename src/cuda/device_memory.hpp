// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// Memory of a stream's device, for the table of step/device.hpp. Apart from it, so that an emulated
// device is easy to give. All throw Error.
namespace syncbn::cuda {

/// Throws std::bad_alloc, too.
void* allocate_on(void* stream, std::size_t bytes);
void release_on(void* stream, void* memory) noexcept;
void zero_on(void* stream, void* memory, std::size_t bytes);
/// From the device to itself.
void copy_on(void* stream, void* to, const void* from, std::size_t bytes);
/// To memory of the host; waits for the stream.
void fetch_on(void* stream, void* to, const void* from, std::size_t bytes);
/// From memory of the host; waits: a device that reads pageable memory directly may read it late.
void bring_on(void* stream, void* to, const void* from, std::size_t bytes);

/// Tells a stream of the current device from all that the process has, or had. Zero while it is
/// captured, or if CUDA cannot say.
std::uint64_t stream_number(void* stream) noexcept;

}  // namespace syncbn::cuda
