#pragma once

namespace syncbn::cuda {

/// Throws Unavailable in a build without CUDA.
void require();

}  // namespace syncbn::cuda
