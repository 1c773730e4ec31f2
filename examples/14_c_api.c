// SPDX-License-Identifier: Apache-2.0
/* The C interface: three ranks that share statistics have the bits of one. The ranks are parts of
   one array here, and a loop adds up their messages; between processes any all-reduce (SUM) of
   int64 does, MPI_Allreduce for example. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syncbn/c_api.h>

enum { SAMPLES = 100, CHANNELS = 4, RANKS = 3 };

static void check(syncbn_status status) {
  if (status != SYNCBN_OK) {
    fprintf(stderr, "error %d: %s\n", (int)status, syncbn_last_error());
    exit(1);
  }
}

int main(void) {
  float x[SAMPLES * CHANNELS], y_of_one[SAMPLES * CHANNELS], y[SAMPLES * CHANNELS];
  for (int i = 0; i < SAMPLES * CHANNELS; ++i) {
    x[i] = (float)(i * i % 97) * 0.37f;
  }

  /* One rank: the layer. */
  const int64_t shape[2] = {SAMPLES, CHANNELS};
  const syncbn_tensor whole = {x, SYNCBN_FLOAT32, SYNCBN_CPU, 2, shape, NULL};
  const syncbn_tensor result = {y_of_one, SYNCBN_FLOAT32, SYNCBN_CPU, 2, shape, NULL};
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL; /* for the backward */
  check(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer));
  check(syncbn_saved_create(&saved));
  const syncbn_forward_arguments forward = {
      .struct_size = sizeof(forward), .x = &whole, .y = &result};
  check(syncbn_batch_norm_forward(layer, &forward, saved, NULL));
  printf("mean of channel 0: %.17g\n", syncbn_saved_mean(saved)[0]);
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);

  /* Three ranks: the passes, and an exchange between them. */
  const int64_t first[RANKS + 1] = {0, 10, 61, SAMPLES};
  int64_t words = 0;
  uint32_t fingerprint = 0;
  check(syncbn_message_words(SYNCBN_FLOAT32, CHANNELS, &words));
  check(syncbn_fingerprint(1, 0, SYNCBN_FORWARD, CHANNELS, options.eps, &fingerprint));
  int64_t* message = malloc((size_t)words * sizeof(int64_t));
  int64_t* sum = calloc((size_t)words, sizeof(int64_t));
  for (int r = 0; r < RANKS; ++r) {
    const int64_t sizes[2] = {first[r + 1] - first[r], CHANNELS};
    const syncbn_tensor part = {
        x + first[r] * CHANNELS, SYNCBN_FLOAT32, SYNCBN_CPU, 2, sizes, NULL};
    check(syncbn_local_moments(&part, NULL, message, fingerprint, NULL));
    for (int64_t i = 0; i < words; ++i) {
      sum[i] += message[i];
    }
  }
  syncbn_message_info info;
  double mean[CHANNELS], var[CHANNELS], rstd[CHANNELS];
  check(syncbn_read_header(sum, RANKS, &info));
  check(syncbn_check_header(&info)); /* all ranks made the same call */
  check(syncbn_finalize_moments(&info, sum + SYNCBN_HEADER_WORDS, mean, var, rstd, CHANNELS,
                                options.eps, NULL));
  for (int r = 0; r < RANKS; ++r) {
    const int64_t sizes[2] = {first[r + 1] - first[r], CHANNELS};
    const syncbn_tensor part = {
        x + first[r] * CHANNELS, SYNCBN_FLOAT32, SYNCBN_CPU, 2, sizes, NULL};
    syncbn_tensor out = part;
    out.data = y + first[r] * CHANNELS;
    check(syncbn_normalize(&part, NULL, mean, rstd, NULL, NULL, NULL, &out, NULL, NULL, NULL));
  }
  free(message);
  free(sum);
  const int same = memcmp(y, y_of_one, sizeof(y)) == 0;
  printf("%d ranks and 1 rank: %s\n", RANKS, same ? "the same bits" : "different bits");
  return same ? 0 : 1;
}
