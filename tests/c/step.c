// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <stdio.h>
#include <string.h>

int failures = 0;

void expect(int ok, const char* text, const char* file, int line) {
  if (!ok) {
    fprintf(stderr, "%s:%d: %s (last error: %s)\n", file, line, text, syncbn_last_error());
    ++failures;
  }
}
/* The call fails with this code, and the text holds this part. */
void expect_error(syncbn_status status, syncbn_status wanted, const char* part, const char* file,
                  int line) {
  if (status != wanted || strstr(syncbn_last_error(), part) == NULL) {
    fprintf(stderr, "%s:%d: got %d '%s', expected %d '%s'\n", file, line, (int)status,
            syncbn_last_error(), (int)wanted, part);
    ++failures;
  }
}
void fill(step_memory* m) {
  memset(m, 0, sizeof(*m));
  uint32_t state = 1;
  for (int i = 0; i < ELEMENTS; ++i) {
    state = state * 1664525u + 1013904223u;
    m->x[i] = (float)(state >> 8) / 4194304.0f - 1.0f;
    state = state * 1664525u + 1013904223u;
    m->dy[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    m->residual[i] = 0.01f * (float)(i * i % 131) - 0.6f;
  }
  for (int i = 0; i < SAMPLES * PLANE; ++i) {
    m->mask[i] = i % 4 != 1;
  }
  for (int c = 0; c < CHANNELS; ++c) {
    m->weight[c] = 0.5f + 0.25f * (float)c;
    m->bias[c] = 0.1f * (float)c;
    m->running_var[c] = 1.0f;
  }
}

void expect_same(const step_memory* got, const step_memory* expected, const char* file, int line) {
  expect(memcmp(got, expected, sizeof(*got)) == 0, "the C++ interface's bits", file, line);
}

void view(views* v, step_memory* m, int first, int last) {
  v->sizes[0] = v->mask_sizes[0] = last - first;
  v->sizes[1] = v->channels = CHANNELS;
  v->sizes[2] = v->mask_sizes[1] = PLANE;
  const syncbn_tensor samples = {NULL, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 3, v->sizes, NULL};
  const syncbn_tensor entries = {NULL, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU,
                                 1,    &v->channels,         NULL};
  v->x = v->dy = v->y = v->dx = v->evaluated = v->residual = v->dresidual = samples;
  const int at = first * CHANNELS * PLANE;
  v->x.data = m->x + at;
  v->dy.data = m->dy + at;
  v->y.data = m->y + at;
  v->dx.data = m->dx + at;
  v->evaluated.data = m->evaluated + at;
  v->residual.data = m->residual + at;
  v->dresidual.data = m->dresidual + at;
  v->weight = v->bias = v->dweight = v->dbias = v->running_mean = v->running_var = entries;
  v->weight.data = m->weight;
  v->bias.data = m->bias;
  v->dweight.data = m->dweight;
  v->dbias.data = m->dbias;
  v->running_mean.data = m->running_mean;
  v->running_var.data = m->running_var;
  v->mask.data = m->mask + first * PLANE;
  v->mask.device = SYNCBN_DEVICE_CPU;
  v->mask.ndim = 2;
  v->mask.sizes = v->mask_sizes;
  v->num_batches_tracked = NULL;
}

syncbn_batch_norm_options options_of_reference(void) {
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  options.name = "layer";
  options.eps = 1e-3;
  options.momentum = 0.3;
  options.activation.kind = SYNCBN_ACTIVATION_LEAKY_RELU;
  options.activation.negative_slope = 0.2;
  return options;
}

syncbn_forward_arguments forward_arguments(const views* v) {
  const syncbn_forward_arguments arguments = {.struct_size = sizeof(arguments),
                                              .x = &v->x,
                                              .mask = &v->mask,
                                              .weight = &v->weight,
                                              .bias = &v->bias,
                                              .y = &v->y,
                                              .running_mean = &v->running_mean,
                                              .running_var = &v->running_var,
                                              .num_batches_tracked = v->num_batches_tracked};
  return arguments;
}

syncbn_backward_arguments backward_arguments(const views* v) {
  const syncbn_backward_arguments arguments = {.struct_size = sizeof(arguments),
                                               .dy = &v->dy,
                                               .x = &v->x,
                                               .mask = &v->mask,
                                               .weight = &v->weight,
                                               .bias = &v->bias,
                                               .dx = &v->dx,
                                               .dweight = &v->dweight,
                                               .dbias = &v->dbias,
                                               .affine = SYNCBN_AFFINE_GRADIENTS_GLOBAL};
  return arguments;
}

syncbn_evaluate_arguments evaluate_arguments(const views* v) {
  const syncbn_evaluate_arguments arguments = {.struct_size = sizeof(arguments),
                                               .x = &v->x,
                                               .mask = &v->mask,
                                               .weight = &v->weight,
                                               .bias = &v->bias,
                                               .running_mean = &v->running_mean,
                                               .running_var = &v->running_var,
                                               .y = &v->evaluated};
  return arguments;
}

syncbn_status forward(const views* v, syncbn_saved* saved, const syncbn_batch_norm_options* options,
                      const syncbn_communicator* communicator) {
  const syncbn_forward_arguments arguments = forward_arguments(v);
  syncbn_batch_norm* layer = NULL;
  syncbn_status status = syncbn_batch_norm_create(options, communicator, &layer);
  EXPECT((layer != NULL) == (status == SYNCBN_STATUS_OK));
  if (status == SYNCBN_STATUS_OK) {
    status = syncbn_batch_norm_forward(layer, &arguments, saved, NULL);
  }
  syncbn_batch_norm_destroy(layer);
  return status;
}

void make_fixture(fixture* x) {
  fill(&x->m);
  view(&x->v, &x->m, 0, SAMPLES);
  x->options = options_of_reference();
  x->f = forward_arguments(&x->v);
  x->b = backward_arguments(&x->v);
  x->e = evaluate_arguments(&x->v);
  x->layer = NULL;
  x->saved = NULL;
}

void make_layer(fixture* x, const syncbn_communicator* communicator) {
  EXPECT_OK(syncbn_batch_norm_create(&x->options, communicator, &x->layer));
  EXPECT_OK(syncbn_saved_create(&x->saved));
}

void destroy_fixture(fixture* x) {
  syncbn_batch_norm_destroy(x->layer);
  syncbn_saved_destroy(x->saved);
}
