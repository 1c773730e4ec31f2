// SPDX-License-Identifier: Apache-2.0
#define _POSIX_C_SOURCE 200809L

#include "group.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct end {
  group* g;
  int rank;
} end;

struct group {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int arrived;
  int generation;
  const void* brought[RANKS];
  int64_t bytes[RANKS];
  char left[200]; /* why a rank left the group, or "" */
  int32_t gone;   /* that rank */
  end ends[RANKS];
};

group* group_create(void) {
  group* g = calloc(1, sizeof(group));
  pthread_mutex_init(&g->mutex, NULL);
  pthread_cond_init(&g->changed, NULL);
  for (int r = 0; r < RANKS; ++r) {
    g->ends[r].g = g;
    g->ends[r].rank = r;
  }
  return g;
}

void group_destroy(group* g) {
  pthread_cond_destroy(&g->changed);
  pthread_mutex_destroy(&g->mutex);
  free(g);
}

/* Waits for the other rank: 0, or 1 when it has left. */
static int meet(group* g) {
  pthread_mutex_lock(&g->mutex);
  const int generation = g->generation;
  if (++g->arrived == RANKS) {
    g->arrived = 0;
    ++g->generation;
    pthread_cond_broadcast(&g->changed);
  }
  while (g->generation == generation && g->left[0] == '\0') {
    pthread_cond_wait(&g->changed, &g->mutex);
  }
  const int lost = g->generation == generation;
  pthread_mutex_unlock(&g->mutex);
  return lost;
}

/* Shows every rank's bytes to each other, until group_close. */
static int32_t group_open(const end* mine, const void* in, int64_t bytes) {
  group* g = mine->g;
  g->brought[mine->rank] = in;
  g->bytes[mine->rank] = bytes;
  if (meet(g)) {
    syncbn_set_last_error(g->left, &g->gone, 1);
    return SYNCBN_STATUS_PEER_LOST;
  }
  return SYNCBN_STATUS_OK;
}

int32_t group_gather(void* user_data, const void* in, int64_t bytes, void* out) {
  const end* mine = user_data;
  group* g = mine->g;
  const int32_t status = group_open(mine, in, bytes);
  if (status != SYNCBN_STATUS_OK) {
    return status;
  }
  for (int r = 0; r < RANKS; ++r) {
    memcpy((char*)out + r * bytes, g->brought[r], (size_t)bytes);
  }
  meet(g);
  return SYNCBN_STATUS_OK;
}

static int32_t all_reduce_sum(void* user_data, int64_t* words, int64_t count) {
  const end* mine = user_data;
  group* g = mine->g;
  const int32_t status = group_open(mine, words, count * (int64_t)sizeof(int64_t));
  if (status != SYNCBN_STATUS_OK) {
    return status;
  }
  if (g->bytes[0] != g->bytes[1]) {
    meet(g);
    return SYNCBN_STATUS_DIVERGENCE; /* without a text */
  }
  uint64_t* sum = malloc((size_t)count * sizeof(uint64_t) + 1);
  for (int64_t i = 0; i < count; ++i) {
    sum[i] = 0;
    for (int r = 0; r < RANKS; ++r) {
      sum[i] += (uint64_t)((const int64_t*)g->brought[r])[i];
    }
  }
  meet(g); /* nobody reads the words any more */
  memcpy(words, sum, (size_t)count * sizeof(uint64_t));
  free(sum);
  return SYNCBN_STATUS_OK;
}

static void leave(void* user_data, const char* reason) {
  const end* mine = user_data;
  group* g = mine->g;
  pthread_mutex_lock(&g->mutex);
  g->gone = mine->rank;
  snprintf(g->left, sizeof(g->left), "rank %d left: %s", mine->rank, reason);
  pthread_cond_broadcast(&g->changed);
  pthread_mutex_unlock(&g->mutex);
}

/* Every rank's call has ended, so one of them may forget why the group broke. */
static int32_t forget(void* user_data) {
  const end* mine = user_data;
  pthread_mutex_lock(&mine->g->mutex);
  mine->g->left[0] = '\0';
  mine->g->arrived = 0;
  pthread_mutex_unlock(&mine->g->mutex);
  return SYNCBN_STATUS_OK;
}

syncbn_communicator group_rank(group* g, int rank) {
  const syncbn_communicator communicator = {.struct_size = sizeof(communicator),
                                            .user_data = &g->ends[rank],
                                            .rank = rank,
                                            .size = RANKS,
                                            .all_reduce_sum = all_reduce_sum,
                                            .abandon = leave,
                                            .reset = forget};
  return communicator;
}

typedef struct thread_of_rank {
  void (*body)(void* context, int rank);
  void* context;
  int rank;
} thread_of_rank;

static void* run(void* argument) {
  const thread_of_rank* t = argument;
  t->body(t->context, t->rank);
  return NULL;
}

void run_ranks(void (*body)(void* context, int rank), void* context) {
  pthread_t threads[RANKS];
  thread_of_rank arguments[RANKS];
  for (int r = 0; r < RANKS; ++r) {
    arguments[r].body = body;
    arguments[r].context = context;
    arguments[r].rank = r;
    if (pthread_create(&threads[r], NULL, run, &arguments[r]) != 0) {
      abort();
    }
  }
  for (int r = 0; r < RANKS; ++r) {
    pthread_join(threads[r], NULL);
  }
}
