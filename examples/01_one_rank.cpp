// One rank: batch normalization in training, forward and backward.
#include <cstdio>
#include <syncbn/batch_norm.hpp>
#include <vector>

int main() {
  using syncbn::DType;
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8};  // (N = 2, C = 2, 2 values per plane)
  std::vector<float> y(8), dx(8), mean(2, 0.0f), var(2, 1.0f), dweight(2), dbias(2);
  const auto communicator = syncbn::self_communicator();
  syncbn::Executor& executor = syncbn::serial_executor();

  const syncbn::TensorView input(x.data(), DType::kFloat32, {2, 2, 2});
  const syncbn::MutableTensorView output(y.data(), DType::kFloat32, {2, 2, 2});
  const syncbn::RunningStatistics running = {{mean.data(), DType::kFloat32, {2}},
                                             {var.data(), DType::kFloat32, {2}}};
  const auto statistics = syncbn::batch_norm_forward(input, {}, {}, {}, {}, output, running, {},
                                                     *communicator, executor);
  // The output serves as the output's gradient here.
  syncbn::batch_norm_backward(
      output, input, {}, {}, {}, statistics, {dx.data(), DType::kFloat32, {2, 2, 2}},
      {dweight.data(), DType::kFloat32, {2}}, {dbias.data(), DType::kFloat32, {2}}, {},
      syncbn::AffineGradients::kShare, *communicator, executor);
  std::printf("mean %g %g, variance %g %g, count %lld\n", statistics.mean[0], statistics.mean[1],
              statistics.var[0], statistics.var[1], static_cast<long long>(statistics.count));
  // The channels are 1 2 5 6 and 3 4 7 8.
  return statistics.mean[0] == 3.5 && statistics.mean[1] == 5.5 && statistics.var[0] == 4.25 ? 0
                                                                                             : 1;
}
