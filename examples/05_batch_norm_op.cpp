// SPDX-License-Identifier: Apache-2.0
// The operator in place: a training and an inference operator that share their variables.
#include <cstdio>
#include <syncbn/batch_norm_op.hpp>
#include <vector>

int main() {
  using syncbn::DType;
  const std::vector<float> x = {1, 3, 5, 7};  // (N = 4, C = 1): mean 4, variance 5
  std::vector<float> y(4), estimated_mean(1), estimated_var(1);
  std::int64_t batches = 0;
  const syncbn::MutableTensorView output(y.data(), DType::kFloat32, {4, 1});
  const syncbn::MutableTensorView mean(estimated_mean.data(), DType::kFloat32, {1});
  const syncbn::MutableTensorView var(estimated_var.data(), DType::kFloat32, {1});
  syncbn::Communicator& communicator = syncbn::self_communicator();

  const auto run = [&](const syncbn::BatchNormOpAttributes& attributes) {
    return syncbn::batch_norm_op({{x.data(), DType::kFloat32, {4, 1}}, mean, var, {}, {}, batches},
                                 {output, {}, {}, mean, var, &batches}, attributes, communicator,
                                 syncbn::serial_executor());
  };
  const syncbn::BatchNormOpAttributes train;
  syncbn::BatchNormOpAttributes infer;
  infer.is_infer = true;

  run(train);  // the first batch assigns
  const std::vector<float> trained = y;
  run(infer);  // the estimates are now those of this batch: the same output
  std::printf("estimated mean %g, variance %g after %lld batch\n",
              static_cast<double>(estimated_mean[0]), static_cast<double>(estimated_var[0]),
              static_cast<long long>(batches));
  return estimated_mean[0] == 4 && estimated_var[0] == 5 && batches == 1 && y == trained ? 0 : 1;
}
