// SPDX-License-Identifier: Apache-2.0
#include "defect_cases.hpp"

#include <array>
#include <cstring>
#include <utility>

#include "emulator.hpp"
#include "on_cuda.hpp"
#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/passes.hpp"
#include "syncbn/welford.hpp"

namespace syncbn::ptx {
namespace {

using testing::Tensor;
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

Bytes bytes_of(const Tensor& tensor) {
  Bytes out((tensor.storage().size() + 7) / 8);
  std::memcpy(out.data(), tensor.storage().data(), tensor.storage().size());
  return out;
}

}  // namespace

std::vector<Case> all_cases() {
  std::vector<Case> out;
  testing::Random random(5);
  for (const DType dtype : testing::kDtypes) {
    for (const auto memory :
         {testing::Memory::kPlanes, testing::Memory::kRows, testing::Memory::kPlanesSlice}) {
      // With 7 channels accesses of 16 bytes do not fit; from 32 on short planes go through shared
      // memory; with 600 and more there are more of them than blocks.
      for (const auto& [samples, channels, plane] : std::vector<std::array<std::int64_t, 3>>{
               {90, 36, 1}, {90, 8, 32}, {90, 7, 33}, {9, 8, 1104}, {2, 600, 32}, {2, 1101, 33}}) {
        Tensor x(dtype, {samples, channels, plane}, memory);
        x.fill(testing::rough_values(random, dtype, samples, channels * plane));
        const std::vector<double> mean(size(channels), 0.25);
        const std::string text = std::string(name(dtype)) + " " + std::to_string(plane) +
                                 " memory " + std::to_string(static_cast<int>(memory));
        out.push_back({"moments " + text,
                       [=] {
                         Bytes words(size(message_words(dtype, channels)), -1);
                         Bytes workspace(size(cuda::workspace_words(dtype, channels)), 0);
                         cuda::local_moments(on_cuda(x.view()), {}, {}, words.data(),
                                             workspace.data(), {});
                         words.insert(words.end(), workspace.begin(), workspace.end());
                         return words;
                       },
                       {}});
        for (const auto& [kind, keep] :
             std::vector<std::pair<ActivationKind, bool>>{{ActivationKind::kNone, false},
                                                          {ActivationKind::kRelu, false},
                                                          {ActivationKind::kRelu, true}}) {
          out.push_back({"gradients " + text,
                         [=] {
                           Bytes words(size(message_words(dtype, channels)), -1);
                           Bytes workspace(size(cuda::workspace_words(dtype, channels)), 0);
                           Tensor u = x;
                           const ActivationGradient through{{kind, 0}, {}, {}, nullptr};
                           const TensorView view = on_cuda(TensorView(x.view()));
                           cuda::local_gradients({view,
                                                  view,
                                                  {},
                                                  mean.data(),
                                                  mean.data(),
                                                  through,
                                                  keep ? on_cuda(u.view()) : MutableTensorView()},
                                                 nullptr, words.data(), workspace.data(), {});
                           words.insert(words.end(), workspace.begin(), workspace.end());
                           const Bytes kept = bytes_of(u);
                           words.insert(words.end(), kept.begin(), kept.end());
                           return words;
                         },
                         {}});
          if (keep) {
            continue;
          }
          out.push_back({"normalize " + text,
                         [=] {
                           Tensor y = x;
                           cuda::normalize({on_cuda(TensorView(x.view())),
                                            {},
                                            mean.data(),
                                            mean.data(),
                                            {},
                                            {},
                                            {},
                                            on_cuda(y.view()),
                                            nullptr,
                                            {kind, 0}},
                                           {});
                           return bytes_of(y);
                         },
                         {}});
        }
        out.push_back({"welford " + text,
                       [=] {
                         Bytes words(size(kHeaderWords + welford_words(dtype, channels)), -1);
                         cuda::local_welford(on_cuda(x.view()), {}, {}, words.data(), {});
                         return words;
                       },
                       {}});
      }
    }
  }
  return out;
}

}  // namespace syncbn::ptx
