// SPDX-License-Identifier: Apache-2.0
/* A call in two halves, whose exchange is the caller's, against the layer, bit for bit: on every
   rank its own, and on one rank that has the whole batch. The ranks are parts of an array here. */

#include "parts.h"

/* What the other ranks of a layer bring, made by halves. */
typedef struct others {
  int rank, ranks;
  const part* parts;
  int exchanges; /* so far: the forward's, then the backward's */
} others;

static int32_t add_others(void* user_data, int64_t* words, int64_t count) {
  others* o = user_data;
  for (int r = 0; r < o->ranks; ++r) {
    if (r != o->rank) {
      add(words, o->exchanges == 0 ? o->parts[r].message : o->parts[r].own, count);
    }
  }
  ++o->exchanges;
  return SYNCBN_OK;
}

static int32_t gather_others(void* user_data, const void* in, int64_t bytes, void* out) {
  others* o = user_data;
  for (int r = 0; r < o->ranks; ++r) {
    const void* from = r == o->rank ? in : o->parts[r].message;
    memcpy((char*)out + r * bytes, from, (size_t)bytes);
  }
  ++o->exchanges;
  return SYNCBN_OK;
}

/* The same call of a layer of rank `rank`, whose other ranks are `parts`. */
static void by_layer(part* p, int rank, int ranks, const part* parts) {
  others o = {rank, ranks, parts, 0};
  const syncbn_communicator communicator = {.struct_size = sizeof(communicator),
                                            .user_data = &o,
                                            .rank = rank,
                                            .size = ranks,
                                            .all_reduce_sum = add_others,
                                            .all_gather = gather_others};
  syncbn_batch_norm* layer = NULL;
  syncbn_saved* saved = NULL;
  EXPECT_OK(syncbn_batch_norm_create(&p->options, &communicator, &layer));
  EXPECT_OK(syncbn_saved_create(&saved));
  EXPECT_OK(syncbn_batch_norm_forward(layer, &p->f, saved, NULL));
  EXPECT_OK(syncbn_batch_norm_backward(layer, &p->b, saved, NULL));
  memcpy(p->r.mean, syncbn_saved_mean(saved), sizeof(p->r.mean));
  memcpy(p->r.var, syncbn_saved_var(saved), sizeof(p->r.var));
  memcpy(p->r.rstd, syncbn_saved_rstd(saved), sizeof(p->r.rstd));
  p->r.info[0] = syncbn_saved_count(saved);
  syncbn_saved_destroy(saved);
  syncbn_batch_norm_destroy(layer);
}

static void expect_same_results(const results* got, const results* expected) {
  EXPECT_SAME(&got->m, &expected->m);
  EXPECT(SAME(got->dresidual, expected->dresidual));
  EXPECT(SAME(got->mean, expected->mean) && SAME(got->var, expected->var));
  EXPECT(SAME(got->rstd, expected->rstd) && got->info[0] == expected->info[0]);
}

/* first: the ranks' first samples, and behind them the batch's end. */
static void expect_the_layers_bits(const int* first, int ranks, const usage* u) {
  part parts[MOST_RANKS];
  for (int r = 0; r < ranks; ++r) {
    make_part(&parts[r], first[r], first[r + 1], ranks, u);
  }
  by_halves(parts, ranks, u->statistics);
  for (int r = 0; r < ranks; ++r) {
    part expected;
    make_part(&expected, first[r], first[r + 1], ranks, u);
    by_layer(&expected, r, ranks, parts);
    expect_same_results(&parts[r].r, &expected.r);
  }
  if (u->statistics == SYNCBN_WELFORD) {
    return; /* whose bits depend on the ranks */
  }
  part whole;
  make_part(&whole, 0, SAMPLES, 1, u);
  whole.b.affine = SYNCBN_GLOBAL;
  by_layer(&whole, 0, 1, NULL);
  for (int r = 0; r < ranks; ++r) {
    const int at = first[r] * CHANNELS * PLANE;
    const size_t bytes = (size_t)((first[r + 1] - first[r]) * CHANNELS * PLANE) * sizeof(float);
    const results* got = &parts[r].r;
    EXPECT(memcmp(got->m.y + at, whole.r.m.y + at, bytes) == 0);
    EXPECT(memcmp(got->m.dx + at, whole.r.m.dx + at, bytes) == 0);
    EXPECT(memcmp(got->dresidual + at, whole.r.dresidual + at, bytes) == 0);
    EXPECT(SAME(got->mean, whole.r.mean) && SAME(got->m.running_var, whole.r.m.running_var));
    EXPECT(u->affine == SYNCBN_SHARE || SAME(got->m.dweight, whole.r.m.dweight));
  }
}

static void layers_bits_exact(void) {
  static const struct {
    int ranks, first[MOST_RANKS + 1];
  } shards[] = {{1, {0, SAMPLES}},
                {2, {0, FIRST, SAMPLES}},
                {2, {0, 0, SAMPLES}}, /* rank 0 has none */
                {3, {0, 1, 1, SAMPLES}},
                {3, {0, 1, 5, SAMPLES}}};
  const usage usages[] = {plain,
                          {0, 1, SYNCBN_LEAKY_RELU, SYNCBN_GLOBAL, SYNCBN_REPRODUCIBLE},
                          with_residual,
                          {1, 1, SYNCBN_RELU, SYNCBN_GLOBAL, SYNCBN_REPRODUCIBLE},
                          {1, 1, SYNCBN_NONE, SYNCBN_SHARE, SYNCBN_REPRODUCIBLE},
                          {1, 0, SYNCBN_NONE, SYNCBN_GLOBAL, SYNCBN_REPRODUCIBLE},
                          {1, 1, SYNCBN_LEAKY_RELU, SYNCBN_SHARE, SYNCBN_WELFORD}};
  for (size_t i = 0; i < sizeof(shards) / sizeof(shards[0]); ++i) {
    for (size_t u = 0; u < sizeof(usages) / sizeof(usages[0]); ++u) {
      expect_the_layers_bits(shards[i].first, shards[i].ranks, &usages[u]);
    }
  }
}

/* One rank needs no name. */
static void without_a_name_exact(void) {
  part named, unnamed;
  make_part(&named, 0, SAMPLES, 1, &with_residual);
  make_part(&unnamed, 0, SAMPLES, 1, &with_residual);
  unnamed.options.name = NULL;
  by_halves(&named, 1, SYNCBN_REPRODUCIBLE);
  by_halves(&unnamed, 1, SYNCBN_REPRODUCIBLE);
  expect_same_results(&unnamed.r, &named.r);
}

void test_step(void) {
  layers_bits_exact();
  without_a_name_exact();
}
