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
  const syncbn_tensor samples = {NULL, SYNCBN_FLOAT32, SYNCBN_CPU, 3, v->sizes, NULL};
  const syncbn_tensor entries = {NULL, SYNCBN_FLOAT32, SYNCBN_CPU, 1, &v->channels, NULL};
  v->x = v->dy = v->y = v->dx = v->evaluated = samples;
  const int at = first * CHANNELS * PLANE;
  v->x.data = m->x + at;
  v->dy.data = m->dy + at;
  v->y.data = m->y + at;
  v->dx.data = m->dx + at;
  v->evaluated.data = m->evaluated + at;
  v->weight = v->bias = v->dweight = v->dbias = v->running_mean = v->running_var = entries;
  v->weight.data = m->weight;
  v->bias.data = m->bias;
  v->dweight.data = m->dweight;
  v->dbias.data = m->dbias;
  v->running_mean.data = m->running_mean;
  v->running_var.data = m->running_var;
  v->mask.data = m->mask + first * PLANE;
  v->mask.device = SYNCBN_CPU;
  v->mask.ndim = 2;
  v->mask.sizes = v->mask_sizes;
}

syncbn_batch_norm_options options_of_reference(void) {
  syncbn_batch_norm_options options;
  syncbn_batch_norm_options_init(&options);
  options.eps = 1e-3;
  options.momentum = 0.3;
  options.layer = 1;
  options.activation.kind = SYNCBN_LEAKY_RELU;
  options.activation.negative_slope = 0.2;
  return options;
}

syncbn_status forward(const views* v, syncbn_batch_statistics** statistics,
                      const syncbn_batch_norm_options* options,
                      const syncbn_communicator* communicator) {
  return syncbn_batch_norm_forward(&v->x, &v->mask, &v->weight, &v->bias, NULL, &v->y,
                                   &v->running_mean, &v->running_var, NULL, statistics, options,
                                   communicator, NULL);
}
