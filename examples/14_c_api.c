// SPDX-License-Identifier: Apache-2.0
/* The C interface: three ranks that share statistics have the bits of one. The ranks are threads
   here; between processes the group is one over shared memory or MPI, or the caller's own. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syncbn/c_api.h>

enum { SAMPLES = 100, CHANNELS = 4, RANKS = 3 };

static void check(syncbn_status status) {
  if (status != SYNCBN_STATUS_OK) {
    fprintf(stderr, "error %d: %s\n", (int)status, syncbn_last_error());
    exit(1);
  }
}

static float x[SAMPLES * CHANNELS], y[SAMPLES * CHANNELS], y_of_one[SAMPLES * CHANNELS];

typedef struct part {
  const syncbn_communicator* communicator;
  int64_t first, last; /* its samples are those before `last` */
} part;

static void* train(void* given) {
  const part* p = given;
  const int64_t sizes[2] = {p->last - p->first, CHANNELS};
  const syncbn_tensor in = {
      x + p->first * CHANNELS, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, sizes, NULL};
  const syncbn_tensor out = {
      y + p->first * CHANNELS, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, sizes, NULL};
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  options.name = "bn"; /* the same on all ranks */
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL; /* for the backward */
  check(syncbn_batch_norm_create(&options, p->communicator, &layer));
  check(syncbn_saved_create(&saved));
  const syncbn_forward_arguments forward = {.struct_size = sizeof(forward), .x = &in, .y = &out};
  check(syncbn_batch_norm_forward(layer, &forward, saved, NULL));
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
  return NULL;
}

int main(void) {
  for (int i = 0; i < SAMPLES * CHANNELS; ++i) {
    x[i] = (float)(i * i % 97) * 0.37f;
  }

  /* One rank: the layer. */
  const int64_t shape[2] = {SAMPLES, CHANNELS};
  const syncbn_tensor whole = {x, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, shape, NULL};
  const syncbn_tensor result = {y_of_one, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, shape, NULL};
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  check(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer));
  check(syncbn_saved_create(&saved));
  const syncbn_forward_arguments forward = {
      .struct_size = sizeof(forward), .x = &whole, .y = &result};
  check(syncbn_batch_norm_forward(layer, &forward, saved, NULL));
  printf("mean of channel 0: %.17g\n", syncbn_saved_mean(saved)[0]);
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);

  /* Three ranks, each with a part of the batch. */
  const int64_t first[RANKS + 1] = {0, 10, 61, SAMPLES};
  part parts[RANKS];
  pthread_t threads[RANKS];
  syncbn_group* group = NULL;
  check(syncbn_thread_group_create(RANKS, 60000, &group));
  for (int r = 0; r < RANKS; ++r) {
    parts[r] = (part){syncbn_group_rank(group, r), first[r], first[r + 1]};
    if (pthread_create(&threads[r], NULL, train, &parts[r]) != 0) {
      return 1;
    }
  }
  for (int r = 0; r < RANKS; ++r) {
    pthread_join(threads[r], NULL);
  }
  syncbn_group_destroy(group);
  const int same = memcmp(y, y_of_one, sizeof(y)) == 0;
  printf("%d ranks and 1 rank: %s\n", RANKS, same ? "the same bits" : "different bits");
  return same ? 0 : 1;
}
