// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_C_PASSES_H
#define SYNCBN_C_PASSES_H

/* The passes of a layer, for those who own the exchange; see syncbn/passes.hpp. Argument order:
   inputs, outputs, sizes, options, execution. */

#include "syncbn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

enum syncbn_direction { SYNCBN_FORWARD = 0, SYNCBN_BACKWARD = 1 };

/* Words in front of the channels' words of a message. */
#define SYNCBN_HEADER_WORDS 8

/* How a gradient comes back through the activation: see ActivationGradient in syncbn/passes.hpp. */
typedef struct syncbn_activation_gradient {
  syncbn_activation activation;
  const syncbn_tensor* weight;    /* or NULL */
  const syncbn_tensor* bias;      /* or NULL */
  const uint8_t* activation_mask; /* or NULL */
} syncbn_activation_gradient;

SYNCBN_API syncbn_status syncbn_words_per_channel(int32_t dtype, int32_t* words);
SYNCBN_API syncbn_status syncbn_message_words(int32_t dtype, int64_t channels, int64_t* words);
SYNCBN_API syncbn_status syncbn_activation_mask_bytes(const syncbn_tensor* x, int64_t* bytes);

/* 20 bits that all ranks of one exchange must share; direction: enum syncbn_direction. */
SYNCBN_API syncbn_status syncbn_fingerprint(uint64_t layer, uint64_t call, int32_t direction,
                                            int64_t channels, double eps, uint32_t* fingerprint);

/* What the header of a summed message says; agree, any_rejected, any_data: 0 or 1. */
typedef struct syncbn_message_info {
  int64_t count;
  int32_t agree;
  int32_t any_rejected;
  int32_t any_data;
  int32_t dtype; /* enum syncbn_dtype */
} syncbn_message_info;

SYNCBN_API syncbn_status syncbn_read_header(const int64_t* merged, int32_t ranks,
                                            syncbn_message_info* info);
/* SYNCBN_DIVERGENCE unless all ranks agree. */
SYNCBN_API syncbn_status syncbn_check_header(const syncbn_message_info* info);
/* message: SYNCBN_HEADER_WORDS words, what a rank sends whose own input was refused. */
SYNCBN_API syncbn_status syncbn_rejection_header(uint32_t fingerprint, int64_t* message);

/* mask: or NULL. message: syncbn_message_words(dtype of x, C) words. */
SYNCBN_API syncbn_status syncbn_local_moments(const syncbn_tensor* x, const syncbn_mask* mask,
                                              int64_t* message, uint32_t fingerprint,
                                              syncbn_executor* executor);

/* words: a summed message behind its header. */
SYNCBN_API syncbn_status syncbn_finalize_moments(const syncbn_message_info* info,
                                                 const int64_t* words, double* mean, double* var,
                                                 double* rstd, int64_t channels, double eps,
                                                 syncbn_executor* executor);

/* mask, weight, bias, residual, activation_mask, activation: or NULL. */
SYNCBN_API syncbn_status syncbn_normalize(const syncbn_tensor* x, const syncbn_mask* mask,
                                          const double* mean, const double* rstd,
                                          const syncbn_tensor* weight, const syncbn_tensor* bias,
                                          const syncbn_tensor* residual, const syncbn_tensor* y,
                                          uint8_t* activation_mask,
                                          const syncbn_activation* activation,
                                          syncbn_executor* executor);

/* running_mean, running_var: or NULL. factor: in [0, 1]. */
SYNCBN_API syncbn_status syncbn_update_running_statistics(const syncbn_tensor* running_mean,
                                                          const syncbn_tensor* running_var,
                                                          const double* mean, const double* var,
                                                          int64_t channels, int64_t count,
                                                          double factor);

/* mask, through, u: or NULL. fingerprint: with SYNCBN_BACKWARD. */
SYNCBN_API syncbn_status syncbn_local_gradients(const syncbn_tensor* dy, const syncbn_tensor* x,
                                                const syncbn_mask* mask, const double* mean,
                                                const double* rstd,
                                                const syncbn_activation_gradient* through,
                                                const syncbn_tensor* u, int64_t* message,
                                                uint32_t fingerprint, syncbn_executor* executor);

/* weight, dweight, dbias: or NULL. coefficients: 3 * C. count: as forward had it. */
SYNCBN_API syncbn_status syncbn_finalize_gradients(
    const syncbn_message_info* info, const int64_t* words, const double* mean, const double* rstd,
    const syncbn_tensor* weight, double* coefficients, const syncbn_tensor* dweight,
    const syncbn_tensor* dbias, int64_t channels, int64_t count, syncbn_executor* executor);

/* words: this rank's own message behind its header, of `dtype`. dweight, dbias: or NULL. */
SYNCBN_API syncbn_status syncbn_affine_gradient_shares(const int64_t* words, int32_t dtype,
                                                       const double* mean, const double* rstd,
                                                       const syncbn_tensor* dweight,
                                                       const syncbn_tensor* dbias, int64_t channels,
                                                       syncbn_executor* executor);

/* mask, through: or NULL. */
SYNCBN_API syncbn_status syncbn_input_gradient(const syncbn_tensor* dy, const syncbn_tensor* x,
                                               const syncbn_mask* mask, const double* mean,
                                               const double* rstd, const double* coefficients,
                                               const syncbn_activation_gradient* through,
                                               const syncbn_tensor* dx, syncbn_executor* executor);

/* x from y = leaky_relu(normalized x) of syncbn_normalize, without a mask, up to rounding; x may be
   y. weight, bias: or NULL. activation_mask: syncbn_activation_mask_bytes(y) bytes, written. */
SYNCBN_API syncbn_status syncbn_recover_input(const syncbn_tensor* y, const double* mean,
                                              const double* rstd, const syncbn_tensor* weight,
                                              const syncbn_tensor* bias, const syncbn_tensor* x,
                                              uint8_t* activation_mask, double negative_slope,
                                              syncbn_executor* executor);

/* dx = weight * rstd * u, the gradient of syncbn_normalize with constant statistics; u: dy come
   back through the activation. mask, weight: or NULL. */
SYNCBN_API syncbn_status syncbn_evaluation_input_gradient(
    const syncbn_tensor* u, const syncbn_mask* mask, const double* rstd,
    const syncbn_tensor* weight, const syncbn_tensor* dx, syncbn_executor* executor);

/* ---- Of SYNCBN_WELFORD; see syncbn/welford.hpp ---- */

/* Of a rank's record, which stands behind the message's header. */
SYNCBN_API syncbn_status syncbn_welford_words(int32_t dtype, int64_t channels, int64_t* words);

/* mask: or NULL. message: SYNCBN_HEADER_WORDS and syncbn_welford_words(dtype of x, C) words. */
SYNCBN_API syncbn_status syncbn_local_welford(const syncbn_tensor* x, const syncbn_mask* mask,
                                              int64_t* message, uint32_t fingerprint,
                                              syncbn_executor* executor);

/* info: of the headers' sum. records: that of rank r begins at stride * r. */
SYNCBN_API syncbn_status syncbn_merge_welford(const syncbn_message_info* info,
                                              const int64_t* records, double* mean, double* var,
                                              double* rstd, int64_t channels, int32_t ranks,
                                              int64_t stride, double eps);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_C_PASSES_H */
