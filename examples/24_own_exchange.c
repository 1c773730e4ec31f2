// SPDX-License-Identifier: Apache-2.0
/* A framework in C that owns the exchange. A call of the layer has two halves, and what happens
   between them is the caller's. Two processes have a part of the batch each; their messages go
   through a socket, and both add them up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syncbn/c_api.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SAMPLES = 100, FIRST = 30, CHANNELS = 4, VALUES = SAMPLES * CHANNELS };

static void check(syncbn_status status) {
  if (status != SYNCBN_OK) {
    fprintf(stderr, "error %d: %s\n", (int)status, syncbn_last_error());
    exit(1);
  }
}

static float x[VALUES], dy[VALUES], y[VALUES], dx[VALUES], y_of_one[VALUES], dx_of_one[VALUES];

static syncbn_tensor part_of(float* values, int first, const int64_t* sizes) {
  return (syncbn_tensor){values + first * CHANNELS, SYNCBN_FLOAT32, SYNCBN_CPU, 2, sizes, NULL};
}

/* The sum over both ranks. */
static void all_reduce(int socket, const int64_t* message, int64_t* merged, size_t words) {
  const size_t bytes = words * sizeof(int64_t);
  if (send(socket, message, bytes, 0) != (ssize_t)bytes ||
      recv(socket, merged, bytes, MSG_WAITALL) != (ssize_t)bytes) {
    exit(1);
  }
  for (size_t i = 0; i < words; ++i) {
    merged[i] = (int64_t)((uint64_t)merged[i] + (uint64_t)message[i]);
  }
}

/* One rank's samples are those from `first` to before `last`. */
static void train(int socket, int first, int last) {
  const int64_t sizes[2] = {last - first, CHANNELS};
  const syncbn_tensor in = part_of(x, first, sizes), out = part_of(y, first, sizes);
  const syncbn_tensor gradient = part_of(dy, first, sizes), back = part_of(dx, first, sizes);
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  options.name = "bn";
  int64_t call = 0, info[2], words, words_back; /* call: one for each layer */
  double mean[CHANNELS], var[CHANNELS], rstd[CHANNELS];
  check(syncbn_step_sizes(&in, options.statistics, &words, &words_back, NULL));
  int64_t* const message = calloc((size_t)(words + words_back), sizeof(int64_t));
  int64_t* const merged = calloc((size_t)(words + words_back), sizeof(int64_t));

  const syncbn_step step = {sizeof(step), &options, 2, &call, mean, var, rstd, info, NULL};
  const syncbn_forward_arguments forward = {.struct_size = sizeof(forward), .x = &in, .y = &out};
  check(syncbn_forward_begin(&step, &forward, message, NULL));
  all_reduce(socket, message, merged, (size_t)words); /* or start it, and do something else */
  check(syncbn_forward_finish(&step, &forward, merged, NULL));

  const syncbn_backward_arguments backward = {
      .struct_size = sizeof(backward), .dy = &gradient, .x = &in, .dx = &back};
  check(syncbn_backward_begin(&step, &backward, message, NULL));
  all_reduce(socket, message, merged, (size_t)words_back);
  check(syncbn_backward_finish(&step, &backward, message, merged, NULL));
  free(message);
  free(merged);
}

/* The layer of one rank. */
static void train_alone(void) {
  const int64_t sizes[2] = {SAMPLES, CHANNELS};
  const syncbn_tensor in = part_of(x, 0, sizes), out = part_of(y_of_one, 0, sizes);
  const syncbn_tensor gradient = part_of(dy, 0, sizes), back = part_of(dx_of_one, 0, sizes);
  syncbn_batch_norm_options options = SYNCBN_BATCH_NORM_OPTIONS_INIT;
  options.channels = CHANNELS;
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  check(syncbn_batch_norm_create(&options, syncbn_self_communicator(), &layer));
  check(syncbn_saved_create(&saved));
  const syncbn_forward_arguments forward = {.struct_size = sizeof(forward), .x = &in, .y = &out};
  check(syncbn_batch_norm_forward(layer, &forward, saved, NULL));
  const syncbn_backward_arguments backward = {
      .struct_size = sizeof(backward), .dy = &gradient, .x = &in, .dx = &back};
  check(syncbn_batch_norm_backward(layer, &backward, saved, NULL));
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

int main(void) {
  for (int i = 0; i < VALUES; ++i) {
    x[i] = (float)(i * i % 97) * 0.37f;
    dy[i] = (float)(i * i % 89) * 0.11f;
  }
  train_alone();
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) {
    return 1;
  }
  const pid_t child = fork();
  const int rank = child == 0 ? 1 : 0;
  const int first = rank == 0 ? 0 : FIRST, last = rank == 0 ? FIRST : SAMPLES;
  close(sockets[1 - rank]);
  train(sockets[rank], first, last);
  const size_t bytes = (size_t)((last - first) * CHANNELS) * sizeof(float);
  const int same = memcmp(y + first * CHANNELS, y_of_one + first * CHANNELS, bytes) == 0 &&
                   memcmp(dx + first * CHANNELS, dx_of_one + first * CHANNELS, bytes) == 0;
  if (rank == 1) {
    return same ? 0 : 1;
  }
  int status = 1;
  const int both = waitpid(child, &status, 0) == child && status == 0 && same;
  printf("2 ranks and 1 rank: %s\n", both ? "the same bits" : "different bits");
  return both ? 0 : 1;
}
