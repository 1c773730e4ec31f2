// SPDX-License-Identifier: Apache-2.0
// One rank: batch normalization in training, forward and backward.
#include <cstdio>
#include <syncbn/batch_norm.hpp>
#include <vector>

int main() {
  const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7, 8};  // (N = 2, C = 2, 2 values per plane)
  std::vector<float> y(8), dx(8), mean(2, 0.0f), var(2, 1.0f), dweight(2), dbias(2);
  syncbn::BatchNorm layer({.channels = 2});
  syncbn::Saved saved;  // what the backward needs of the forward besides x
  layer.forward({.x = {x, {2, 2, 2}},
                 .y = {y, {2, 2, 2}},
                 .running_mean = {mean, {2}},
                 .running_var = {var, {2}}},
                saved);
  // The output serves as the output's gradient here.
  layer.backward({.dy = {y, {2, 2, 2}},
                  .x = {x, {2, 2, 2}},
                  .dx = {dx, {2, 2, 2}},
                  .dweight = {dweight, {2}},
                  .dbias = {dbias, {2}}},
                 saved);
  std::printf("mean %g %g, variance %g %g, count %lld\n", saved.mean()[0], saved.mean()[1],
              saved.var()[0], saved.var()[1], static_cast<long long>(saved.count()));
  // The channels are 1 2 5 6 and 3 4 7 8.
  return saved.mean()[0] == 3.5 && saved.mean()[1] == 5.5 && saved.var()[0] == 4.25 ? 0 : 1;
}
