// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_TESTS_C_REFERENCE_H
#define SYNCBN_TESTS_C_REFERENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A layer's step on one rank. */
typedef struct layer_step {
  const float* x; /* (samples, channels, plane), row-major, as all below */
  const float* dy;
  const uint8_t* mask; /* (samples, plane) */
  const float* weight;
  const float* bias;
  float* y;
  float* dx;
  float* dweight; /* sums over all ranks */
  float* dbias;
  float* running_mean;
  float* running_var;
  float* evaluated; /* y of evaluation with these running statistics */
  int64_t samples, channels, plane;
} layer_step;

/* Runs it by the C++ interface: leaky ReLU with slope 0.2, eps 1e-3, momentum 0.3. */
void reference_step(const layer_step* step);

/* What else a step may take, on the same arrays (y: in the place of a forward's output). */
typedef struct other_passes {
  const float* x;
  const float* dy;
  const uint8_t* mask;
  const float* weight;
  const float* bias;
  const float* running_mean;
  const float* running_var;
  float* dx; /* of evaluation, as dweight and dbias */
  float* dweight;
  float* dbias;
  float* plain_dx; /* evaluation_input_gradient of dy, with the merged rstd */
  double* mean;    /* Welford, of two ranks that share the samples at `first` */
  double* var;
  double* rstd;
  float* recovered; /* x from normalize without a mask, with the merged statistics */
  uint8_t* activation_mask;
  int64_t samples, channels, plane, first;
} other_passes;

/* Runs them by the C++ interface, with the options of reference_step. */
void reference_other_passes(const other_passes* passes);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_TESTS_C_REFERENCE_H */
