// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <utility>

// Pictures like those of examples/segmentation, whose scanned digits and photographs come from
// Python packages: digits of seven segments on a smooth background.

constexpr int kSide = 32;
constexpr int kClasses = 11;  // background and the digits

inline int random(int below) {
  return static_cast<int>(torch::randint(below, {}).item<std::int64_t>());
}

/// A picture (3, kSide, kSide) and its classes, from PyTorch's generator.
inline std::pair<torch::Tensor, torch::Tensor> new_picture() {
  // Segments: top, upper left, upper right, middle, lower left, lower right, bottom.
  const char* const digits[] = {"1110111", "0010010", "1011101", "1011011", "0111010",
                                "1101011", "1101111", "1010010", "1111111", "1111011"};
  const int where[7][4] = {{0, 0, 2, 8},  {0, 0, 7, 2},  {0, 6, 7, 8},  {6, 0, 8, 8},
                           {7, 0, 14, 2}, {7, 6, 14, 8}, {12, 0, 14, 8}};
  torch::Tensor picture = torch::upsample_bilinear2d(0.7 * torch::rand({1, 3, 4, 4}),
                                                     {kSide, kSide}, /*align_corners=*/false)[0];
  torch::Tensor classes = torch::zeros({kSide, kSide}, torch::kLong);
  const torch::Tensor ink = 0.6 + 0.4 * torch::rand({3, 1, 1});
  for (int half = 0; half < kSide; half += kSide / 2) {  // a digit in each half
    const int digit = random(10);
    const int top = random(kSide - 13);
    const int left = half + random(kSide / 2 - 7);
    for (int s = 0; s < 7; ++s) {
      if (digits[digit][s] == '1') {
        const torch::indexing::Slice rows(top + where[s][0], top + where[s][2]);
        const torch::indexing::Slice columns(left + where[s][1], left + where[s][3]);
        picture.index_put_({torch::indexing::Slice(), rows, columns}, ink);
        classes.index_put_({rows, columns}, digit + 1);
      }
    }
  }
  // Exposure, tint and noise.
  picture = picture * torch::exp2(-torch::rand({})) * (0.8 + 0.2 * torch::rand({3, 1, 1}));
  picture = (picture + 0.02 * torch::randn_like(picture)).clamp(0, 1);
  return {(picture - 0.35) / 0.25, classes};
}
