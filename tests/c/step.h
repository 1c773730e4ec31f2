// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_TESTS_C_STEP_H
#define SYNCBN_TESTS_C_STEP_H

/* What the tests of the C interface share: a batch, its views, and expectations. */

#include "syncbn/c_api.h"

enum { SAMPLES = 7, CHANNELS = 3, PLANE = 10, ELEMENTS = SAMPLES * CHANNELS * PLANE };
enum { FIRST = 2 }; /* samples of rank 0 */

extern int failures;
void expect(int ok, const char* text, const char* file, int line);
#define EXPECT(condition) expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_OK(call) expect((call) == SYNCBN_STATUS_OK, #call, __FILE__, __LINE__)

/* The call fails with this code, and the text holds this part. */
void expect_error(syncbn_status status, syncbn_status wanted, const char* part, const char* file,
                  int line);
#define EXPECT_ERROR(call, wanted, part) expect_error((call), (wanted), (part), __FILE__, __LINE__)

/* A batch, and what a step makes of it. */
typedef struct step_memory {
  float x[ELEMENTS], dy[ELEMENTS], y[ELEMENTS], dx[ELEMENTS], evaluated[ELEMENTS];
  float residual[ELEMENTS], dresidual[ELEMENTS];
  uint8_t mask[SAMPLES * PLANE];
  float weight[CHANNELS], bias[CHANNELS], dweight[CHANNELS], dbias[CHANNELS];
  float running_mean[CHANNELS], running_var[CHANNELS];
} step_memory;

void fill(step_memory* m);
void expect_same(const step_memory* got, const step_memory* expected, const char* file, int line);
#define EXPECT_SAME(got, expected) expect_same((got), (expected), __FILE__, __LINE__)

/* Views of samples `first` to `last` - 1 of a batch. */
typedef struct views {
  int64_t sizes[3];
  int64_t mask_sizes[2];
  int64_t channels;
  syncbn_tensor x, dy, y, dx, evaluated, residual, dresidual;
  syncbn_tensor weight, bias, dweight, dbias, running_mean, running_var;
  syncbn_mask mask;
  int64_t* num_batches_tracked;
} views;

void view(views* v, step_memory* m, int first, int last);

syncbn_batch_norm_options options_of_reference(void);

/* With all that views have; the residual and its gradient are absent. */
syncbn_forward_arguments forward_arguments(const views* v);
syncbn_backward_arguments backward_arguments(const views* v);
syncbn_evaluate_arguments evaluate_arguments(const views* v);

/* A forward of a layer that is made for it. */
syncbn_status forward(const views* v, syncbn_saved* saved, const syncbn_batch_norm_options* options,
                      const syncbn_communicator* communicator);

/* A batch, all arguments over it, and a layer that is made last. */
typedef struct fixture {
  step_memory m;
  views v;
  syncbn_batch_norm_options options;
  syncbn_forward_arguments f;
  syncbn_backward_arguments b;
  syncbn_evaluate_arguments e;
  syncbn_batch_norm* layer;
  syncbn_saved* saved;
} fixture;

void make_fixture(fixture* x);
void make_layer(fixture* x, const syncbn_communicator* communicator);
void destroy_fixture(fixture* x);

/* A step by the C++ interface, with the options of reference; with a residual or without. */
void reference_step(step_memory* m, int residual);

/* The backward of an evaluation with these running statistics: dx, dweight and dbias. */
void reference_evaluate_backward(step_memory* m);

/* In c_api_errors_test.c and c_api_reset_test.c. */
void test_errors(void);
void test_reset(void);

#endif /* SYNCBN_TESTS_C_STEP_H */
