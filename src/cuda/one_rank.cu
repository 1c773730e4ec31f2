// SPDX-License-Identifier: Apache-2.0
#include "cuda/one_rank.cuh"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "cuda/sum_arguments.cuh"

// A direction of one rank: one kernel where the step is plain and its tensors fit the shared memory
// of all multiprocessors, else three.
namespace syncbn::cuda {
namespace {

/// Cuts the units into jobs for `takers` of them (warps or blocks) at a time; returns how many
/// units, in rounds of `at_once`, some taker has in all.
std::int64_t deal_out(SumsArguments& a, std::int64_t channel_blocks, std::int64_t at_once,
                      std::int64_t takers) {
  // No more jobs than takers: one with two jobs would make the tile of all twice as large.
  deal(a, channel_blocks, at_once,
       std::max(takers / channel_blocks, std::int64_t{1}) * channel_blocks);
  return divide_up(a.jobs, takers) * a.units_per_job / at_once;
}

/// How a kernel takes tensors.
struct Shape {
  unsigned threads;
  unsigned takers;  ///< of jobs, in a block
  std::int64_t channel_blocks;
  std::int64_t at_once;           ///< units
  std::size_t bytes_of_vectors;   ///< of a block's threads together, of all inputs
  std::size_t bytes_before_tile;  ///< a multiple of 16
};

/// Starts the kernel if all of it fits the device. Several small blocks reach the memory's speed
/// better than few large ones, but what they take at a time has to fit.
template <class Kernel>
bool start_together(Kernel kernel, const Shape& shape, OneRankArguments& a, const Stream& stream) {
  SumsArguments& sums = a.sums;
  int count = 0;
  require("finding the device", device::multiprocessors(&count));
  const std::int64_t vectors_of_unit =
      divide_up(std::min<std::int64_t>(sums.plane, kSegment), kLanes);
  for (const unsigned blocks : {6u, 4u, 3u, 2u}) {
    const std::int64_t takers = std::int64_t{blocks} * shape.takers * count;
    const std::int64_t units = deal_out(sums, shape.channel_blocks, shape.at_once, takers);
    const std::size_t bytes =
        shape.bytes_before_tile +
        static_cast<std::size_t>(units * vectors_of_unit) * shape.bytes_of_vectors;
    const std::int64_t grid =
        std::min(blocks * std::int64_t{count}, divide_up(sums.jobs, std::int64_t{shape.takers}));
    if (std::int64_t{device::blocks_at_once(kernel, shape.threads, bytes)} * count < grid) {
      continue;
    }
    a.tile_at = static_cast<unsigned>(shape.bytes_before_tile);
    const auto grid_size = static_cast<unsigned>(grid);
    const device::Failure failure =
        device::launch<true>(kernel, grid_size, shape.threads, bytes, stream.handle, a);
    if (failure.not_together) {
      return false;
    }
    require_started("a direction of one rank", grid_size, shape.threads, failure);
    return true;
  }
  return false;
}

/// A kernel for T, the layout and these options, if there is one and it fits.
template <bool kGradient, class Pass, class T>
bool start_pass(const Plan& plan, OneRankArguments& a, const Stream& stream) {
  constexpr std::size_t kInputs = kGradient ? 2 : 1;
  static_assert(kThreadPerSlot<T>);  // so that packing needs no memory beside the fold's
  if (plan.layout == Layout::kPlanes) {
    constexpr unsigned kWarps = kPlaneSumThreads / device::kWarp;
    return start_together(&one_rank_planes<Pass, T, kGradient>,
                          {.threads = kPlaneSumThreads,
                           .takers = kWarps,
                           .channel_blocks = a.sums.channels,
                           .at_once = device::kWarp * kWidest<T> / kLanes,
                           .bytes_of_vectors = kPlaneSumThreads * 16 * kInputs,
                           .bytes_before_tile = 0},
                          a, stream);
  }
  constexpr int kVector = kRowVector<T, kGradient>;
  constexpr unsigned kWidth = kRowColumns<kVector> * kVector;
  constexpr unsigned kThreads = kLanes * kRowColumns<kVector>;
  constexpr std::size_t kFold = kLanes * kWidth * sizeof(Lane<T>);
  return start_together(&one_rank_rows<Pass, T, kGradient, kVector>,
                        {.threads = kThreads,
                         .takers = 1,
                         .channel_blocks = divide_up(a.sums.channels, std::int64_t{kWidth}),
                         .at_once = 1,
                         .bytes_of_vectors = kThreads * kVector * sizeof(T) * kInputs,
                         .bytes_before_tile = kFold},
                        a, stream);
}

template <bool kGradient, template <class, class> class Pass>
bool start_one_rank(DType dtype, const Plan& plan, OneRankArguments& a, const Stream& stream) {
  const bool rows_of_one = plan.layout == Layout::kRows && a.sums.plane == 1;
  if (!plan.wide || rows_of_one) {
    return false;
  }
  return dispatch_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (Lane<T>::kPair) {
      return false;
    } else {
      return with_plain_options(false, a.elements.pullback.activation, [&](auto options) {
        return start_pass<kGradient, Pass<T, decltype(options)>, T>(plan, a, stream);
      });
    }
  });
}

template <bool kGradient, class Pass, class T>
void load_pass() {
  const auto load_with_memory = [](auto kernel) {
    load(kernel);
    require("loading a kernel", device::allow_all_shared_memory(kernel));
  };
  load_with_memory(&one_rank_planes<Pass, T, kGradient>);
  load_with_memory(&one_rank_rows<Pass, T, kGradient, kRowVector<T, kGradient>>);
}

void set_up(OneRankArguments& a, const SampleView& x, const SampleView& out, const char* out_name,
            std::int64_t* workspace) {
  a.elements.out = operand(out_name, out);
  a.elements.channels = x.channels;
  a.meeting = workspace + workspace_words(x.dtype, x.channels) - kMeetingWords;
}

bool in_one_kernel(const ForwardPass& p, const ForwardCall& call, std::int64_t* info,
                   const RunningStatistics& running, std::optional<double> momentum,
                   std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  const bool cumulative = !momentum.has_value() && !(running.mean.absent() && running.var.absent());
  const SampleView x(p.x, p.mask);
  if (cumulative || x.mask != nullptr || !p.residual.absent() || p.activation_mask != nullptr) {
    return false;
  }
  const SampleView y(p.y);
  OneRankArguments a;
  a.sums.u = operand("x", x);
  a.sums.v = a.sums.u;
  a.elements.pullback.activation = p.activation;
  a.elements.pullback.affine = {p.mean, p.rstd, channel_array(p.weight, 1.0),
                                channel_array(p.bias, 0.0)};
  set_up(a, x, y, "y", workspace);
  a.mean = p.mean;
  a.var = p.var;
  a.rstd = p.rstd;
  a.info = info;
  a.eps = call.eps;
  a.running = running_arrays(running);
  a.momentum = momentum.value_or(0.0);
  return fill_sums(a.sums, x, moments_header(call), message, workspace) &&
         start_one_rank<false, NormalizePass>(p.x.dtype, Plan({&x, &y}, nullptr), a, stream);
}

bool in_one_kernel(const BackwardPass& p, const std::int64_t* info, double* coefficients,
                   std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  const SampleView x(p.x, p.mask);
  if (x.mask != nullptr || !p.u.absent() || p.through.activation_mask != nullptr) {
    return false;
  }
  const SampleView dy(p.dy);
  const SampleView dx(p.dx);
  OneRankArguments a;
  a.sums.u = operand("dy", dy);
  a.sums.v = operand("x", x);
  a.sums.pullback = pullback_arrays(p.through, p.mean, p.rstd, x);
  a.elements.pullback = a.sums.pullback;
  a.elements.coefficients = coefficients;
  set_up(a, x, dx, "dx", workspace);
  a.forward_info = info;
  a.weight = channel_array(p.weight, 1.0);
  a.coefficients = coefficients;
  a.dweight = channel_array(p.dweight, 0.0);
  a.dbias = channel_array(p.dbias, 0.0);
  return fill_sums(a.sums, x, gradients_header(info), message, workspace) &&
         start_one_rank<true, InputGradientPass>(p.x.dtype, Plan({&x, &dy, &dx}, nullptr), a,
                                                 stream);
}

}  // namespace

void load_one_rank(DType dtype) {
  dispatch_dtype(dtype, [](auto type) {
    using T = decltype(type);
    if constexpr (!Lane<T>::kPair) {
      load_pass<false, NormalizePass<T, Plain<NotPositive::kKept>>, T>();
      load_pass<false, NormalizePass<T, Plain<NotPositive::kZero>>, T>();
      load_pass<true, InputGradientPass<T, Plain<NotPositive::kKept>>, T>();
      load_pass<true, InputGradientPass<T, Plain<NotPositive::kZero>>, T>();
    }
  });
}

void forward_of_one_rank(const ForwardPass& p, const ForwardCall& call, std::int64_t* info,
                         const RunningStatistics& running, std::optional<double> momentum,
                         std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  const Normalization normalization{
      p.x,         p.mask, p.mean, p.rstd, p.weight, p.bias, p.residual, p.y, p.activation_mask,
      p.activation};
  check_eps(call.eps);
  check_pass(normalization);
  check_update(running, p.x.sizes[1], momentum);
  if (in_one_kernel(p, call, info, running, momentum, message, workspace, stream)) {
    return;
  }
  local_moments(p.x, p.mask, call, message, workspace, stream);
  finalize_moments(message, p.x.dtype, 1, p.mean, p.var, p.rstd, info, p.x.sizes[1], call.eps,
                   running, momentum, stream);
  normalize(normalization, stream);
}

void backward_of_one_rank(const BackwardPass& p, const std::int64_t* info, double* coefficients,
                          std::int64_t* message, std::int64_t* workspace, const Stream& stream) {
  // With a gradient of the residual, what came back through the activation is there already.
  const bool kept = !p.u.absent();
  const GradientSums sums{p.dy, p.x, p.mask, p.mean, p.rstd, p.through, p.u};
  const InputGradient gradient{
      kept ? TensorView(p.u) : p.dy,           p.x, p.mask, p.mean, p.rstd, coefficients,
      kept ? ActivationGradient() : p.through, p.dx};
  const ParameterGradients parameters{p.mean,    p.rstd,  p.weight,    coefficients,
                                      p.dweight, p.dbias, p.x.sizes[1]};
  check_pass(sums);
  check_pass(gradient);
  check_pass(parameters);
  if (in_one_kernel(p, info, coefficients, message, workspace, stream)) {
    return;
  }
  local_gradients(sums, info, message, workspace, stream);
  finalize_gradients(message, p.x.dtype, 1, nullptr, info, parameters, stream);
  input_gradient(gradient, stream);
}

}  // namespace syncbn::cuda
