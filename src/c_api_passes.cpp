// SPDX-License-Identifier: Apache-2.0
#include "c_api_arguments.hpp"
#include "syncbn/welford.hpp"

// The passes of the C interface.
namespace syncbn::c_api {
namespace {

/// x or dy, and its number of channels for arrays beside it.
std::int64_t channels_of(const TensorView& x) { return x.sizes.size() > 1 ? x.sizes[1] : 0; }

ActivationGradient through_of(const syncbn_activation_gradient* given) {
  if (given == nullptr) {
    return {};
  }
  return {activation_of(given->activation), tensor("weight", given->weight),
          tensor("bias", given->bias), given->activation_mask};
}

MessageInfo info_of(const syncbn_message_info* given) {
  const syncbn_message_info& info = required("info", given);
  return {info.count, info.agree != 0, info.any_rejected != 0, info.any_data != 0,
          dtype_of("info.dtype", info.dtype)};
}

}  // namespace
}  // namespace syncbn::c_api

// What follows is C.
using namespace syncbn;
using namespace syncbn::c_api;

syncbn_status syncbn_words_per_channel(int32_t dtype, int32_t* words) {
  return guarded([&] { required("words", words) = words_per_channel(dtype_of("dtype", dtype)); });
}

syncbn_status syncbn_message_words(int32_t dtype, int64_t channels, int64_t* words) {
  return guarded([&] {
    require_channels(channels);
    required("words", words) = message_words(dtype_of("dtype", dtype), channels);
  });
}

syncbn_status syncbn_activation_mask_bytes(const syncbn_tensor* x, int64_t* bytes) {
  return guarded([&] { required("bytes", bytes) = activation_mask_bytes(samples("x", x)); });
}

syncbn_status syncbn_fingerprint(uint64_t layer, uint64_t call, int32_t direction, int64_t channels,
                                 double eps, uint32_t* out) {
  return guarded([&] {
    require_channels(channels);
    required("fingerprint", out) = fingerprint(
        layer, call,
        enum_of("direction", direction, Direction::kBackward, "SYNCBN_FORWARD or SYNCBN_BACKWARD"),
        channels, eps);
  });
}

syncbn_status syncbn_read_header(const int64_t* merged, int32_t ranks, syncbn_message_info* info) {
  return guarded([&] {
    required("merged", merged);
    const MessageInfo read = read_header(merged, ranks);
    required("info", info) = {read.count, read.agree, read.any_rejected, read.any_data,
                              static_cast<int32_t>(read.dtype)};
  });
}

syncbn_status syncbn_check_header(const syncbn_message_info* info) {
  return guarded([&] { check_header(info_of(info)); });
}

syncbn_status syncbn_rejection_header(uint32_t fingerprint, int64_t* message) {
  return guarded([&] { rejection_header(fingerprint, &required("message", message)); });
}

syncbn_status syncbn_local_moments(const syncbn_tensor* x, const syncbn_mask* mask,
                                   int64_t* message, uint32_t fingerprint,
                                   syncbn_executor* executor) {
  return guarded([&] {
    local_moments(samples("x", x), mask_of(mask), &required("message", message), fingerprint,
                  execution_of(executor));
  });
}

syncbn_status syncbn_finalize_moments(const syncbn_message_info* info, const int64_t* words,
                                      double* mean, double* var, double* rstd, int64_t channels,
                                      double eps, syncbn_executor* executor) {
  return guarded([&] {
    require_channels(channels);
    require_array("words", words, channels);
    require_array("mean", mean, channels);
    require_array("var", var, channels);
    require_array("rstd", rstd, channels);
    finalize_moments(info_of(info), words, mean, var, rstd, channels, eps, execution_of(executor));
  });
}

syncbn_status syncbn_normalize(const syncbn_tensor* x, const syncbn_mask* mask, const double* mean,
                               const double* rstd, const syncbn_tensor* weight,
                               const syncbn_tensor* bias, const syncbn_tensor* residual,
                               const syncbn_tensor* y, uint8_t* activation_mask,
                               const syncbn_activation* activation, syncbn_executor* executor) {
  return guarded([&] {
    const TensorView from = samples("x", x);
    require_array("mean", mean, channels_of(from));
    require_array("rstd", rstd, channels_of(from));
    normalize({from, mask_of(mask), mean, rstd, tensor("weight", weight), tensor("bias", bias),
               tensor("residual", residual), samples("y", y), activation_mask,
               activation == nullptr ? Activation() : activation_of(*activation)},
              execution_of(executor));
  });
}

syncbn_status syncbn_update_running_statistics(const syncbn_tensor* running_mean,
                                               const syncbn_tensor* running_var, const double* mean,
                                               const double* var, int64_t channels, int64_t count,
                                               double factor) {
  return guarded([&] {
    require_channels(channels);
    require_array("mean", mean, channels);
    require_array("var", var, channels);
    update_running_statistics(tensor("running_mean", running_mean),
                              tensor("running_var", running_var), mean, var, channels, count,
                              factor);
  });
}

syncbn_status syncbn_local_gradients(const syncbn_tensor* dy, const syncbn_tensor* x,
                                     const syncbn_mask* mask, const double* mean,
                                     const double* rstd, const syncbn_activation_gradient* through,
                                     const syncbn_tensor* u, int64_t* message, uint32_t fingerprint,
                                     syncbn_executor* executor) {
  return guarded([&] {
    const TensorView from = samples("x", x);
    require_array("mean", mean, channels_of(from));
    require_array("rstd", rstd, channels_of(from));
    local_gradients(
        {samples("dy", dy), from, mask_of(mask), mean, rstd, through_of(through), tensor("u", u)},
        &required("message", message), fingerprint, execution_of(executor));
  });
}

syncbn_status syncbn_finalize_gradients(const syncbn_message_info* info, const int64_t* words,
                                        const double* mean, const double* rstd,
                                        const syncbn_tensor* weight, double* coefficients,
                                        const syncbn_tensor* dweight, const syncbn_tensor* dbias,
                                        int64_t channels, int64_t count,
                                        syncbn_executor* executor) {
  return guarded([&] {
    require_channels(channels);
    require_array("words", words, channels);
    require_array("mean", mean, channels);
    require_array("rstd", rstd, channels);
    require_array("coefficients", coefficients, channels);
    finalize_gradients(info_of(info), words,
                       {mean, rstd, tensor("weight", weight), coefficients,
                        tensor("dweight", dweight), tensor("dbias", dbias), channels},
                       count, execution_of(executor));
  });
}

syncbn_status syncbn_affine_gradient_shares(const int64_t* words, int32_t dtype, const double* mean,
                                            const double* rstd, const syncbn_tensor* dweight,
                                            const syncbn_tensor* dbias, int64_t channels,
                                            syncbn_executor* executor) {
  return guarded([&] {
    require_channels(channels);
    require_array("words", words, channels);
    require_array("mean", mean, channels);
    require_array("rstd", rstd, channels);
    affine_gradient_shares(words, dtype_of("dtype", dtype),
                           {.mean = mean,
                            .rstd = rstd,
                            .dweight = tensor("dweight", dweight),
                            .dbias = tensor("dbias", dbias),
                            .channels = channels},
                           execution_of(executor));
  });
}

syncbn_status syncbn_input_gradient(const syncbn_tensor* dy, const syncbn_tensor* x,
                                    const syncbn_mask* mask, const double* mean, const double* rstd,
                                    const double* coefficients,
                                    const syncbn_activation_gradient* through,
                                    const syncbn_tensor* dx, syncbn_executor* executor) {
  return guarded([&] {
    const TensorView from = samples("x", x);
    require_array("mean", mean, channels_of(from));
    require_array("rstd", rstd, channels_of(from));
    require_array("coefficients", coefficients, channels_of(from));
    input_gradient({samples("dy", dy), from, mask_of(mask), mean, rstd, coefficients,
                    through_of(through), samples("dx", dx)},
                   execution_of(executor));
  });
}

syncbn_status syncbn_recover_input(const syncbn_tensor* y, const double* mean, const double* rstd,
                                   const syncbn_tensor* weight, const syncbn_tensor* bias,
                                   const syncbn_tensor* x, uint8_t* activation_mask,
                                   double negative_slope, syncbn_executor* executor) {
  return guarded([&] {
    const TensorView from = samples("y", y);
    require_array("mean", mean, channels_of(from));
    require_array("rstd", rstd, channels_of(from));
    require_array("activation_mask", activation_mask, activation_mask_bytes(from));
    recover_input({from, mean, rstd, tensor("weight", weight), tensor("bias", bias),
                   samples("x", x), activation_mask, negative_slope},
                  execution_of(executor));
  });
}

syncbn_status syncbn_evaluation_input_gradient(const syncbn_tensor* u, const syncbn_mask* mask,
                                               const double* rstd, const syncbn_tensor* weight,
                                               const syncbn_tensor* dx, syncbn_executor* executor) {
  return guarded([&] {
    const TensorView from = samples("u", u);
    require_array("rstd", rstd, channels_of(from));
    evaluation_input_gradient(from, mask_of(mask), rstd, tensor("weight", weight),
                              samples("dx", dx), execution_of(executor));
  });
}

syncbn_status syncbn_welford_words(int32_t dtype, int64_t channels, int64_t* words) {
  return guarded([&] {
    require_channels(channels);
    required("words", words) = welford_words(dtype_of("dtype", dtype), channels);
  });
}

syncbn_status syncbn_local_welford(const syncbn_tensor* x, const syncbn_mask* mask,
                                   int64_t* message, uint32_t fingerprint,
                                   syncbn_executor* executor) {
  return guarded([&] {
    local_welford(samples("x", x), mask_of(mask), &required("message", message), fingerprint,
                  execution_of(executor));
  });
}

syncbn_status syncbn_merge_welford(const syncbn_message_info* info, const int64_t* records,
                                   double* mean, double* var, double* rstd, int64_t channels,
                                   int32_t ranks, int64_t stride, double eps) {
  return guarded([&] {
    const MessageInfo header = info_of(info);
    require_channels(channels);
    require_array("records", records, ranks);
    require_array("mean", mean, channels);
    require_array("var", var, channels);
    require_array("rstd", rstd, channels);
    if (ranks > 1 && stride < welford_words(header.dtype, channels)) {
      refuse("stride", std::to_string(stride), "at least syncbn_welford_words()");
    }
    merge_welford(header, records, mean, var, rstd, channels, ranks, stride, eps);
  });
}
