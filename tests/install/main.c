/* Normalizes two numbers with an installed syncbn, from C. */
#include <stdio.h>
#include <syncbn/c_api.h>

int main(void) {
  float x[] = {1, 3}, y[] = {0, 0};
  const int64_t sizes[] = {2, 1};
  const syncbn_tensor in = {x, SYNCBN_FLOAT32, SYNCBN_CPU, 2, sizes, NULL};
  const syncbn_tensor out = {y, SYNCBN_FLOAT32, SYNCBN_CPU, 2, sizes, NULL};
  syncbn_batch_norm_options options;
  syncbn_batch_norm_options_init(&options);
  options.eps = 0;
  syncbn_batch_statistics* statistics = NULL;
  const syncbn_status status =
      syncbn_batch_norm_forward(&in, NULL, NULL, NULL, NULL, &out, NULL, NULL, NULL, &statistics,
                                &options, syncbn_self_communicator(), NULL);
  if (status != SYNCBN_OK || y[0] != -1 || y[1] != 1) {
    printf("status %d '%s', y %g %g\n", (int)status, syncbn_last_error(), y[0], y[1]);
    return 1;
  }
  syncbn_batch_statistics_destroy(statistics);
  return 0;
}
