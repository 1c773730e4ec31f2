// SPDX-License-Identifier: Apache-2.0
/* Normalizes two numbers with an installed syncbn, from C. */
#include <stdio.h>
#include <syncbn/c_api.h>

int main(void) {
  float x[] = {1, 3}, y[] = {0, 0};
  const int64_t sizes[] = {2, 1};
  const syncbn_tensor in = {x, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, sizes, NULL};
  const syncbn_tensor out = {y, SYNCBN_DTYPE_FLOAT32, SYNCBN_DEVICE_CPU, 2, sizes, NULL};
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = 1;
  options.eps = 0;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  syncbn_status status = syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer);
  if (status == SYNCBN_STATUS_OK) {
    status = syncbn_saved_create(&saved);
  }
  if (status == SYNCBN_STATUS_OK) {
    const syncbn_forward_arguments f = {.struct_size = sizeof(f), .x = &in, .y = &out};
    status = syncbn_batch_norm_forward(layer, &f, saved, NULL);
  }
  if (status != SYNCBN_STATUS_OK || y[0] != -1 || y[1] != 1) {
    printf("status %d '%s', y %g %g\n", (int)status, syncbn_last_error(), y[0], y[1]);
    return 1;
  }
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
  return 0;
}
