#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "command.hpp"
#include "support.hpp"
#include "syncbn/cuda_passes.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/passes.hpp"

// Prints what kernels execute: syncbn_ptx_counts --ptx=FOLDER [--blocks] N C P [DTYPE [rows]]
// runs a forward pass over a tensor (N, C, P) and lists, for each launch, instructions of PTX by
// class, of threads and of warps; --blocks: how often each basic block was executed, too, with its
// lines. What a GPU executes is another number: ptxas makes of an instruction none, one or several.
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

int run_passes(const std::vector<std::string>& rest, bool blocks) {
  if (rest.size() < 3) {
    std::printf("syncbn_ptx_counts --ptx=FOLDER [--blocks] N C P [DTYPE [rows]]\n");
    return 2;
  }
  const std::int64_t samples = std::stoll(rest[0]);
  const std::int64_t channels = std::stoll(rest[1]);
  const std::int64_t plane = std::stoll(rest[2]);
  DType dtype = DType::kFloat32;
  for (const DType one : testing::kDtypes) {
    dtype = rest.size() > 3 && rest[3] == name(one) ? one : dtype;
  }
  session().record = [&](const Record& record) { print(record, blocks); };
  testing::Random random(1);
  testing::Tensor x(dtype, {samples, channels, plane},
                    rest.size() > 4 ? testing::Memory::kRows : testing::Memory::kPlanes);
  x.fill(testing::rough_values(random, dtype, samples, channels * plane));
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
  return 0;
}

}  // namespace
}  // namespace syncbn::ptx

int main(int argc, char** argv) {
  std::vector<std::string> rest;
  bool blocks = false;
  return syncbn::ptx::run_command(
      argc, argv,
      [&](const std::string& argument) {
        blocks = blocks || argument == "--blocks";
        if (argument != "--blocks") {
          rest.push_back(argument);
        }
        return true;
      },
      [&](syncbn::ptx::Library&) { return syncbn::ptx::run_passes(rest, blocks); });
}
