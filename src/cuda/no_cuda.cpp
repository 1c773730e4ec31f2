#include "syncbn/cuda_communicator.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/error.hpp"

// What a build without CUDA answers.
namespace syncbn::cuda {

void require_built() {
  throw Unavailable(
      "this libsyncbn was built without CUDA, so tensors must be on the CPU; to build it with "
      "CUDA, "
      "install the CUDA toolkit (nvcc 12.8 or newer) and configure with -D SYNCBN_CUDA=ON");
}

std::int64_t workspace_words(DType, std::int64_t) {
  require_built();
  return 0;
}
void local_moments(const TensorView&, const MaskView&, const ForwardCall&, std::int64_t*,
                   std::int64_t*, const Stream&) {
  require_built();
}
void finalize_moments(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                      std::int64_t, double, const Stream&) {
  require_built();
}
void finalize_moments(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                      std::int64_t, double, const RunningStatistics&, std::optional<double>,
                      const Stream&) {
  require_built();
}
void local_welford(const TensorView&, const MaskView&, const ForwardCall&, std::int64_t*,
                   const Stream&) {
  require_built();
}
void merge_welford(const std::int64_t*, DType, int, double*, double*, double*, std::int64_t*,
                   std::int64_t, double, const Stream&) {
  require_built();
}
void normalize(const TensorView&, const MaskView&, const double*, const double*, const TensorView&,
               const TensorView&, const TensorView&, const MutableTensorView&, std::uint8_t*,
               const Activation&, const Stream&) {
  require_built();
}
void update_running_statistics(const RunningStatistics&, const double*, const double*,
                               const std::int64_t*, std::int64_t, std::optional<double>,
                               const Stream&) {
  require_built();
}
void evaluation_statistics(const TensorView&, const TensorView&, double*, double*, double,
                           const Stream&) {
  require_built();
}
void local_gradients(const TensorView&, const TensorView&, const MaskView&, const double*,
                     const double*, const ActivationGradient&, const MutableTensorView&,
                     const std::int64_t*, std::int64_t*, std::int64_t*, const Stream&,
                     std::int64_t*) {
  require_built();
}
void finalize_gradients(const std::int64_t*, DType, int, const std::int64_t*, const std::int64_t*,
                        const double*, const double*, const TensorView&, double*,
                        const MutableTensorView&, const MutableTensorView&, std::int64_t,
                        const Stream&) {
  require_built();
}
void input_gradient(const TensorView&, const TensorView&, const MaskView&, const double*,
                    const double*, const double*, const ActivationGradient&,
                    const MutableTensorView&, const Stream&) {
  require_built();
}
void recover_input(const TensorView&, const double*, const double*, const TensorView&,
                   const TensorView&, const MutableTensorView&, std::uint8_t*, double,
                   const Stream&) {
  require_built();
}
void evaluation_input_gradient(const TensorView&, const MaskView&, const double*, const TensorView&,
                               const MutableTensorView&, const Stream&) {
  require_built();
}
std::unique_ptr<Communicator> self_communicator() {
  require_built();
  return nullptr;
}
std::unique_ptr<Communicator> staged_communicator(syncbn::Communicator&) {
  require_built();
  return nullptr;
}
std::int64_t read_count(const std::int64_t*, const Stream&) {
  require_built();
  return 0;
}

}  // namespace syncbn::cuda
