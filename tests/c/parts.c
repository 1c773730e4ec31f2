// SPDX-License-Identifier: Apache-2.0
#include "parts.h"

const usage plain = {0, 0, SYNCBN_LEAKY_RELU, SYNCBN_SHARE, SYNCBN_REPRODUCIBLE};
const usage with_residual = {1, 1, SYNCBN_LEAKY_RELU, SYNCBN_SHARE, SYNCBN_REPRODUCIBLE};

void make_part(part* p, int first, int last, int ranks, const usage* u) {
  memset(p, 0, sizeof(*p));
  fill(&p->r.m);
  view(&p->v, &p->r.m, first, last);
  p->v.num_batches_tracked = &p->r.tracked;
  for (int i = 0; i < ELEMENTS; ++i) {
    p->residual_values[i] = 0.01f * (float)(i * i % 131) - 0.6f;
  }
  p->residual = p->dresidual = p->v.x;
  p->residual.data = p->residual_values + first * CHANNELS * PLANE;
  p->dresidual.data = p->r.dresidual + first * CHANNELS * PLANE;
  p->options = options_of_reference();
  p->options.activation.kind = u->activation;
  p->options.statistics = u->statistics;
  p->f = forward_arguments(&p->v);
  p->b = backward_arguments(&p->v);
  p->b.affine = u->affine;
  if (u->residual) {
    p->f.residual = &p->residual;
    p->b.dresidual = &p->dresidual;
  }
  const syncbn_step step = {
      .struct_size = sizeof(step),
      .options = &p->options,
      .ranks = ranks,
      .call = &p->r.call,
      .mean = p->r.mean,
      .var = p->r.var,
      .rstd = p->r.rstd,
      .info = p->r.info,
      .activation_mask = u->bits ? p->r.bits : NULL,
  };
  p->step = step;
}

void add(int64_t* sum, const int64_t* message, int64_t words) {
  for (int64_t i = 0; i < words; ++i) {
    sum[i] = (int64_t)((uint64_t)sum[i] + (uint64_t)message[i]);
  }
}

void by_halves(part* parts, int ranks, int32_t statistics) {
  int64_t merged[MOST_RANKS * MOST_WORDS] = {0}, merged_back[MOST_WORDS] = {0};
  int64_t words = 0, words_back = 0, bytes = 0;
  EXPECT_OK(syncbn_step_sizes(parts[ranks - 1].f.x, statistics, &words, &words_back, &bytes));
  EXPECT(8 < words && words <= MOST_WORDS && 8 < words_back && words_back <= MOST_WORDS);
  EXPECT(0 < bytes && bytes <= MASK_BYTES);
  for (int r = 0; r < ranks; ++r) {
    part* p = &parts[r];
    EXPECT_OK(syncbn_forward_begin(&p->step, &p->f, p->message, NULL));
    EXPECT(p->r.call == 0);
    if (statistics == SYNCBN_WELFORD) {
      add(merged, p->message, 8);
      memcpy(merged + 8 + r * (words - 8), p->message + 8, (size_t)(words - 8) * 8);
    } else {
      add(merged, p->message, words);
    }
  }
  for (int r = 0; r < ranks; ++r) {
    EXPECT_OK(syncbn_forward_finish(&parts[r].step, &parts[r].f, merged, NULL));
    EXPECT(parts[r].r.call == 1 && parts[r].r.tracked == 1);
  }
  for (int r = 0; r < ranks; ++r) {
    part* p = &parts[r];
    EXPECT_OK(syncbn_backward_begin(&p->step, &p->b, p->own, NULL));
    add(merged_back, p->own, words_back);
  }
  for (int r = 0; r < ranks; ++r) {
    part* p = &parts[r];
    const int64_t* own = p->b.affine == SYNCBN_SHARE ? p->own : NULL;
    EXPECT_OK(syncbn_backward_finish(&p->step, &p->b, own, merged_back, NULL));
  }
}
