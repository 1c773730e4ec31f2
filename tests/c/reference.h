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

/* The backward of an evaluation with these running statistics: dx, dweight and dbias. */
void reference_evaluate_backward(const layer_step* step);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_TESTS_C_REFERENCE_H */
