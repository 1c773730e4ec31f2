// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "command.hpp"
#include "emulator.hpp"
#include "on_cuda.hpp"
#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/passes.hpp"

// What the kernels of plain training steps execute: syncbn_ptx_counts --ptx=FOLDER [WORD...]
// prints, for each pass over each kind of tensor whose line has all the words, its launches, and
// how many warps executed each basic block of PTX, by its first and last line. A GPU executes SASS,
// which ptxas makes of PTX: budget.py brings both together.
namespace syncbn::ptx {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

void print(const Record& record) {
  const Program& program = *record.program;
  std::printf("launch %s %s blocks %u threads %u\n", program.file.c_str(), program.name.c_str(),
              record.blocks, record.threads);
  for (std::size_t b = 0; b < program.blocks.size(); ++b) {
    std::printf("%d %d %llu\n", program.blocks[b].first_line, program.blocks[b].last_line,
                static_cast<unsigned long long>(record.execution.counts[b].warps));
  }
}

/// For 4 multiprocessors what an H100 or an A100 has, for each of its 132 or 108, of ResNet-50's
/// tensors of 512 channels of 784 elements and 2048 of 49, of 128 or 105 pictures.
struct Shape {
  std::int64_t samples, channels, plane;
};
constexpr Shape kShapes[] = {{16, 128, 784}, {128, 64, 49}};
constexpr int kMultiprocessors = 4;

/// The passes over one tensor, with the arrays that they need.
class Passes {
 public:
  Passes(DType dtype, testing::Memory memory, const Shape& shape, ActivationKind kind)
      : dtype_(dtype),
        channels_(shape.channels),
        activation_{kind, 0},
        x_(dtype, {shape.samples, shape.channels, shape.plane}, memory),
        out_(x_),
        means_(size(channels_), 0.25),
        rstds_(size(channels_), 1.5),
        coefficients_(size(3 * channels_), 0.125),
        affine_(DType::kFloat32, {channels_}, testing::Memory::kPlanes) {
    testing::Random random(1);
    std::vector<double> values(size(shape.samples * shape.channels * shape.plane));
    for (double& value : values) {  // nearly normal
      value = testing::round_to(
          dtype, random.signed_unit() + random.signed_unit() + random.signed_unit() + 0.25);
    }
    x_.fill(values);
    affine_.fill(std::vector<double>(size(channels_), 0.75));
  }

  void normalize() {
    cuda::normalize({x(),
                     {},
                     means_.data(),
                     rstds_.data(),
                     affine(),
                     affine(),
                     {},
                     out(),
                     nullptr,
                     activation_},
                    {});
  }
  void input_gradient() {
    cuda::input_gradient({x(),
                          x(),
                          {},
                          means_.data(),
                          rstds_.data(),
                          coefficients_.data(),
                          {activation_, affine(), affine(), nullptr},
                          out()},
                         {});
  }
  void sums_forward() {
    Words words(dtype_, channels_);
    cuda::local_moments(x(), {}, {}, words.message.data(), words.workspace.data(), {});
  }
  void sums_backward() {
    Words words(dtype_, channels_);
    cuda::local_gradients(
        {x(), x(), {}, means_.data(), rstds_.data(), {activation_, affine(), affine(), nullptr}},
        nullptr, words.message.data(), words.workspace.data(), {});
  }

 private:
  struct Words {
    std::vector<std::int64_t> message, workspace;
    Words(DType dtype, std::int64_t channels)
        : message(size(message_words(dtype, channels))),
          workspace(size(cuda::workspace_words(dtype, channels))) {}
  };
  TensorView x() const { return on_cuda(TensorView(x_.view())); }
  TensorView affine() const { return on_cuda(TensorView(affine_.view())); }
  MutableTensorView out() { return on_cuda(MutableTensorView(out_.view())); }

  DType dtype_;
  std::int64_t channels_;
  Activation activation_;
  testing::Tensor x_, out_;
  std::vector<double> means_, rstds_, coefficients_;
  testing::Tensor affine_;
};

struct Pass {
  const char* name;
  void (Passes::*run)();
  bool activated;  ///< has an activation
};
constexpr Pass kPasses[] = {{"normalize", &Passes::normalize, true},
                            {"input_gradient", &Passes::input_gradient, true},
                            {"sums_forward", &Passes::sums_forward, false},
                            {"sums_backward", &Passes::sums_backward, true}};

int count(const std::vector<std::string>& words) {
  emulation::settings().multiprocessors = kMultiprocessors;
  session().record = &print;
  for (const DType dtype : testing::kDtypes) {
    for (const bool rows : {false, true}) {
      for (const Shape& shape : kShapes) {
        for (const auto kind : {ActivationKind::kNone, ActivationKind::kRelu}) {
          for (const Pass& pass : kPasses) {
            const std::string line = std::string("case ") + pass.name + " " + name(dtype) + " " +
                                     (rows ? "channels_last " : "contiguous ") +
                                     std::to_string(shape.plane) +
                                     (kind == ActivationKind::kRelu ? " relu" : " none");
            bool wanted = pass.activated || kind == ActivationKind::kNone;
            for (const std::string& word : words) {
              wanted = wanted && line.find(word) != std::string::npos;
            }
            if (wanted) {
              std::printf("%s %lld\n", line.c_str(),
                          static_cast<long long>(shape.samples * shape.channels * shape.plane));
              Passes passes(dtype, rows ? testing::Memory::kRows : testing::Memory::kPlanes, shape,
                            kind);
              (passes.*pass.run)();
            }
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  std::vector<std::string> words;
  return syncbn::ptx::run_command(
      argc, argv,
      [&](const std::string& word) {
        words.push_back(word);
        return true;
      },
      [&](syncbn::ptx::Library&) { return syncbn::ptx::count(words); });
}
