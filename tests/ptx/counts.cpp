#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "emulator.hpp"
#include "library.hpp"
#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/passes.hpp"

// Prints what kernels execute: syncbn_ptx_counts --ptx=FOLDER [--blocks] [--rough] N C P [DTYPE
// [rows]] runs a forward pass and backward's sums over a tensor (N, C, P) and lists, for each
// launch, instructions of PTX by class, of threads and of warps; --blocks: how often each basic
// block was executed, too, with its lines; --rough: values of 60 binades instead of between -1
// and 1. What a GPU executes is another number: ptxas makes of an instruction none, one or several.
namespace syncbn::ptx {
namespace {

void print(const Record& record, bool blocks) {
  const Program& program = *record.program;
  std::printf("%s: %s, %u blocks of %u threads, %.0f instructions of threads\n",
              program.file.c_str(), program.name.c_str(), record.blocks, record.threads,
              static_cast<double>(record.execution.thread_instructions));
  for (const auto& [name, count] : counts_by_class(record)) {
    if (count.threads > 0) {
      std::printf("  %-16s %12.0f %10.0f\n", name.c_str(), static_cast<double>(count.threads),
                  static_cast<double>(count.warps));
    }
  }
  for (std::size_t b = 0; blocks && b < program.blocks.size(); ++b) {
    const BasicBlock& block = program.blocks[b];
    const BlockCount& count = record.execution.counts[b];
    std::printf("  lines %6d to %6d, %3u instructions: %10.0f threads %9.0f warps\n",
                block.first_line, block.last_line, block.end - block.begin,
                static_cast<double>(count.threads), static_cast<double>(count.warps));
  }
}

int run_passes(int argc, char** argv) {
  const char* folder = std::getenv("SYNCBN_PTX");
  bool blocks = false;
  bool rough = false;
  std::vector<std::string> rest;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--ptx=")) {
      folder = argv[i] + 6;
    } else if (argument == "--blocks") {
      blocks = true;
    } else if (argument == "--rough") {
      rough = true;
    } else {
      rest.push_back(argument);
    }
  }
  if (folder == nullptr || rest.size() < 3) {
    std::printf("syncbn_ptx_counts --ptx=FOLDER [--blocks] [--rough] N C P [DTYPE [rows]]\n");
    return 2;
  }
  const std::int64_t samples = std::stoll(rest[0]);
  const std::int64_t channels = std::stoll(rest[1]);
  const std::int64_t plane = std::stoll(rest[2]);
  DType dtype = DType::kFloat32;
  for (const DType one : testing::kDtypes) {
    dtype = rest.size() > 3 && rest[3] == name(one) ? one : dtype;
  }
  const auto library = Library::read(folder);
  session().library = library.get();
  session().record = [&](const Record& record) { print(record, blocks); };
  use_ptx();
  testing::Random random(1);
  testing::Tensor x(dtype, {samples, channels, plane},
                    rest.size() > 4 ? testing::Memory::kRows : testing::Memory::kPlanes);
  std::vector<double> values = testing::rough_values(random, dtype, samples, channels * plane);
  for (double& value : values) {
    value = rough ? value : testing::round_to(dtype, random.signed_unit());
  }
  x.fill(values);
  testing::Tensor y = x;
  TensorView in = x.view();
  MutableTensorView out = y.view();
  in.device = out.device = Device::kCuda;
  std::vector<std::int64_t> message(static_cast<std::size_t>(message_words(dtype, channels)));
  std::vector<std::int64_t> info(cuda::kInfoWords);
  std::vector<std::int64_t> workspace(
      static_cast<std::size_t>(cuda::workspace_words(dtype, channels)), 0);
  std::vector<double> mean(static_cast<std::size_t>(channels));
  std::vector<double> var(mean);
  std::vector<double> rstd(mean);
  cuda::local_moments(in, {}, {}, message.data(), workspace.data(), {});
  cuda::finalize_moments(message.data(), dtype, 1, mean.data(), var.data(), rstd.data(),
                         info.data(), channels, 0.0, {});
  cuda::normalize(in, {}, mean.data(), rstd.data(), {}, {}, {}, out, nullptr, {}, {});
  cuda::local_gradients(in, in, {}, mean.data(), rstd.data(), {}, {}, info.data(), message.data(),
                        workspace.data(), {});
  return 0;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  try {
    return syncbn::ptx::run_passes(argc, argv);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
