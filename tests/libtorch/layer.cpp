// SPDX-License-Identifier: Apache-2.0
// What test_libtorch.py compares: layer steps DIR RANKS, layer errors DIR, layer state DIR.
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/serialize.h>
#include <syncbn/torch.hpp>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "errors.hpp"
#include "processes.hpp"

namespace {

c10::IValue read(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return torch::jit::pickle_load(
      std::vector<char>{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()});
}

void write(const std::string& file, const c10::IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  std::ofstream(file, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// The steps of each case, on this rank's samples.
void run_steps(const std::string& folder, int rank, const Group& group) {
  c10::Dict<std::string, at::Tensor> results;
  const std::string number = std::to_string(rank);
  for (const auto& item : read(folder + "/in" + number + ".pt").toGenericDict()) {
    const std::string name = item.key().toStringRef();
    const auto given = item.value().toGenericDict();
    const auto tensors = [&](const char* key) { return given.at(key).toListRef(); };
    const auto parameters = given.at("parameters").toGenericDict();
    SyncBatchNormOptions options(given.at("channels").toInt());
    options.affine(!parameters.empty()).track_running_stats(given.at("track").toBool());
    options.momentum(given.at("momentum").toOptional<double>()).process_group(group);
    SyncBatchNorm layer(options.layer_name(name));
    at::NoGradGuard no_grad;
    for (const auto& parameter : parameters) {
      layer->named_parameters()[parameter.key().toStringRef()].set_data(
          parameter.value().toTensor());
    }
    if (given.at("double").toBool()) {
      layer->to(at::kDouble);
    }
    const auto xs = tensors("x");
    const auto dys = tensors("dy");
    for (std::size_t step = 0; step < xs.size(); ++step) {
      at::AutoGradMode grad(true);
      const at::Tensor x = xs[step].toTensor().detach().requires_grad_();
      const at::Tensor y = layer->forward(x);
      const std::string prefix = name + "/" + std::to_string(step) + "/";
      layer->zero_grad();
      y.backward(dys[step].toTensor());
      results.insert(prefix + "y", y.detach());
      results.insert(prefix + "dx", x.grad());
      for (const auto& parameter : layer->named_parameters()) {
        results.insert(prefix + "d" + parameter.key(), parameter.value().grad().clone());
      }
      for (const auto& buffer : layer->named_buffers()) {
        results.insert(prefix + buffer.key(), buffer.value().clone());
      }
    }
    layer->eval();
    results.insert(name + "/eval", layer->forward(tensors("evaluate")[0].toTensor()));
  }
  write(folder + "/out" + number + ".pt", results);
}

/// A state that Python wrote, into a layer and back; and a clone's step.
void run_state(const std::string& folder) {
  SyncBatchNorm layer(SyncBatchNormOptions(3).layer_name("bn"));
  torch::load(layer, folder + "/python.pt");
  const auto copy = std::dynamic_pointer_cast<SyncBatchNorm::Impl>(layer->clone());
  copy->forward(at::ones({2, 3}));  // does not touch the original
  torch::save(layer, folder + "/cpp.pt");
  nn::Sequential network(SyncBatchNorm(SyncBatchNormOptions(3).layer_name("bn")));
  load_python_state(*network, folder + "/state.pt");  // docs/libtorch.md has it
  torch::save(network, folder + "/network.pt");
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments, arguments + count);
  const std::string& folder = given.at(2);
  if (given.at(1) == "steps") {
    const int ranks = std::stoi(given.at(3));
    const auto body = [&](int rank) {
      // 0: no group at all.
      run_steps(folder, rank, ranks == 0 ? Group() : gloo_group(folder + "/store", rank, ranks));
    };
    return in_processes(std::max(ranks, 1), body) ? 0 : 1;
  }
  if (given.at(1) == "state") {
    run_state(folder);
    return 0;
  }
  return write_errors(folder) ? 0 : 1;
}
