// SPDX-License-Identifier: Apache-2.0
/* What the two halves of a call refuse, and how the other ranks learn of it. */

#include <stdio.h>

#include "parts.h"

/* Two ranks whose forward has begun, and the sum of their messages. */
static void begin_two(part* parts, int64_t* merged) {
  memset(merged, 0, MOST_WORDS * sizeof(*merged));
  for (int r = 0; r < 2; ++r) {
    syncbn_forward_begin(&parts[r].step, &parts[r].f, parts[r].message, NULL);
    add(merged, parts[r].message, MOST_WORDS);
  }
}

static void make_two(part* parts) {
  make_part(&parts[0], 0, FIRST, 2, &plain);
  make_part(&parts[1], FIRST, SAMPLES, 2, &plain);
}

/* torch.nn.SyncBatchNorm mixes such ranks' statistics without a word. */
static void different_calls_are_an_error_on_every_rank(void) {
  for (int change = 0; change < 4; ++change) {
    part parts[2];
    int64_t merged[MOST_WORDS];
    make_two(parts);
    parts[1].options.eps = change == 0 ? 1e-4 : parts[1].options.eps;
    parts[1].options.name = change == 1 ? "head" : "layer";
    parts[1].r.call = change == 2 ? 1 : 0;
    parts[1].f.bias = change == 3 ? NULL : parts[1].f.bias;
    begin_two(parts, merged);
    for (int r = 0; r < 2; ++r) {
      const results before = parts[r].r;
      char text[200];
      snprintf(text, sizeof(text),
               "%s, call %d, forward: the ranks of the group did not make the same call: layer, "
               "call number, direction, channels, eps",
               parts[r].options.name, (int)parts[r].r.call);
      EXPECT_ERROR(syncbn_forward_finish(&parts[r].step, &parts[r].f, merged, NULL),
                   SYNCBN_DIVERGENCE, text);
      EXPECT(strcmp(syncbn_last_error_layer(), parts[r].options.name) == 0);
      EXPECT(memcmp(&before, &parts[r].r, sizeof(before)) == 0);
    }
  }
}

/* The other rank needs to know nothing but the message. */
static void a_refused_argument_reaches_the_other_rank(void) {
  part parts[2];
  int64_t merged[MOST_WORDS];
  make_two(parts);
  parts[1].f.y = NULL;
  begin_two(parts, merged);
  EXPECT_ERROR(syncbn_forward_finish(&parts[0].step, &parts[0].f, merged, NULL), SYNCBN_DIVERGENCE,
               "layer, call 0, forward: a rank of the group refused its input");
  parts[1].f.y = &parts[1].v.y; /* the same call of both, made well */
  begin_two(parts, merged);
  for (int r = 0; r < 2; ++r) {
    EXPECT_OK(syncbn_forward_finish(&parts[r].step, &parts[r].f, merged, NULL));
  }
  parts[1].b.x = NULL;
  EXPECT_OK(syncbn_backward_begin(&parts[0].step, &parts[0].b, parts[0].own, NULL));
  EXPECT_ERROR(syncbn_backward_begin(&parts[1].step, &parts[1].b, parts[1].own, NULL),
               SYNCBN_INVALID_ARGUMENT, "layer, backward: x: got NULL");
  memcpy(merged, parts[0].own, sizeof(merged));
  add(merged, parts[1].own, MOST_WORDS);
  const results before = parts[0].r;
  EXPECT_ERROR(syncbn_backward_finish(&parts[0].step, &parts[0].b, parts[0].own, merged, NULL),
               SYNCBN_DIVERGENCE, "layer, backward: a rank of the group refused its input");
  EXPECT(memcmp(&before, &parts[0].r, sizeof(before)) == 0);
}

/* A backward of another call than the others' is told by info, and one of other elements, too. */
static void a_backward_of_another_forward(void) {
  part parts[2];
  int64_t merged[MOST_WORDS];
  make_two(parts);
  begin_two(parts, merged);
  for (int r = 0; r < 2; ++r) {
    EXPECT_OK(syncbn_forward_finish(&parts[r].step, &parts[r].f, merged, NULL));
  }
  for (int change = 0; change < 2; ++change) {
    const int64_t kept = parts[1].r.info[1];
    parts[1].r.info[1] += change == 0 ? 1 : 0;
    parts[1].b.mask = change == 0 ? parts[1].b.mask : NULL;
    memset(merged, 0, sizeof(merged));
    for (int r = 0; r < 2; ++r) {
      EXPECT_OK(syncbn_backward_begin(&parts[r].step, &parts[r].b, parts[r].own, NULL));
      add(merged, parts[r].own, MOST_WORDS);
    }
    for (int r = 0; r < 2; ++r) {
      EXPECT_ERROR(syncbn_backward_finish(&parts[r].step, &parts[r].b, parts[r].own, merged, NULL),
                   SYNCBN_DIVERGENCE,
                   change == 0
                       ? "layer, backward: the ranks of the group did not make the same call"
                       : "layer, backward: backward: the ranks bring 65 elements per channel, "
                         "forward had 52");
    }
    parts[1].r.info[1] = kept;
  }
}

#define REFUSED(call, part) EXPECT_ERROR(call, SYNCBN_INVALID_ARGUMENT, part)

/* Both halves refuse it. A begin leaves a message that says so, and nothing else. */
static void expect_refused(const part* good, part* bad, int backward, const char* text) {
  static const int64_t refusal[8] = {0, 0, 0, 1};
  int64_t* message = bad->message;
  memset(message, 0x55, sizeof(bad->message));
  if (backward) {
    REFUSED(syncbn_backward_begin(&bad->step, &bad->b, message, NULL), text);
    REFUSED(syncbn_backward_finish(&bad->step, &bad->b, good->own, good->own, NULL), text);
  } else {
    REFUSED(syncbn_forward_begin(&bad->step, &bad->f, message, NULL), text);
    REFUSED(syncbn_forward_finish(&bad->step, &bad->f, good->message, NULL), text);
  }
  EXPECT(SAME(refusal, message) && message[8] != 0);
  EXPECT(memcmp(&good->r, &bad->r, sizeof(bad->r)) == 0);
}

static void bad_arguments_change_nothing(void) {
  part good, bad;
  make_part(&good, 0, SAMPLES, 1, &with_residual);
  make_part(&bad, 0, SAMPLES, 1, &with_residual);
#define FORWARD(change, undo, text) ((change), expect_refused(&good, &bad, 0, text), (undo))
#define BACKWARD(change, undo, text) ((change), expect_refused(&good, &bad, 1, text), (undo))
#define BOTH(change, undo, text) (FORWARD(change, undo, text), BACKWARD(change, undo, text))
  BOTH(bad.step.struct_size -= 8, bad.step.struct_size += 8, "step.struct_size: got ");
  BOTH(bad.step.options = NULL, bad.step.options = &bad.options, "options: got NULL");
  BOTH(bad.options.channels = 4, bad.options.channels = CHANNELS,
       "x: got 3 channels, expected those of the layer, 4");
  BOTH(bad.options.eps = -1, bad.options.eps = good.options.eps, "eps: got -1");
  BOTH(bad.options.statistics = 2, bad.options.statistics = 0, "statistics: got 2");
  BOTH(bad.step.ranks = 0, bad.step.ranks = 1, "ranks: got 0, expected 1 to 2048");
  BOTH((bad.step.ranks = 2, bad.options.name = NULL),
       (bad.step.ranks = 1, bad.options.name = "layer"), "options.name: got none");
  FORWARD(bad.step.call = NULL, bad.step.call = &bad.r.call, "layer, forward: call: got NULL");
  BOTH(bad.step.mean = NULL, bad.step.mean = bad.r.mean, "mean: got NULL, expected an array");
  FORWARD(bad.step.var = NULL, bad.step.var = bad.r.var, "var: got NULL, expected an array");
  BOTH(bad.step.rstd = NULL, bad.step.rstd = bad.r.rstd, "rstd: got NULL, expected an array");
  BOTH(bad.step.info = NULL, bad.step.info = bad.r.info, "info: got NULL, expected an array");
  BOTH(bad.step.activation_mask = NULL, bad.step.activation_mask = bad.r.bits,
       "activation_mask: got NULL, expected an array");
  FORWARD(bad.v.y.dtype = SYNCBN_FLOAT64, bad.v.y.dtype = SYNCBN_FLOAT32,
          "layer, call 0, forward: y: got float64, expected the dtype of x, float32");
  FORWARD(bad.v.y.data = bad.r.m.x + 1, bad.v.y.data = bad.r.m.y,
          "y: got memory of x, expected exactly that tensor, or other memory");
  FORWARD(bad.f.running_var = NULL, bad.f.running_var = &bad.v.running_var,
          "running_mean, running_var: got only one of them");
  BACKWARD(bad.b.affine = 2, bad.b.affine = SYNCBN_SHARE, "affine: got 2");
  BACKWARD(bad.v.dweight.data = bad.r.m.dx, bad.v.dweight.data = bad.r.m.dweight,
           "dweight: got memory of dx, expected memory of its own");
  /* SYNCBN_UNAVAILABLE in a build without CUDA. */
  bad.v.x.device = bad.v.y.device = SYNCBN_CUDA;
  const syncbn_forward_arguments on_cuda = {
      .struct_size = sizeof(on_cuda), .x = &bad.v.x, .y = &bad.v.y};
  const syncbn_status status = syncbn_forward_begin(&bad.step, &on_cuda, bad.message, NULL);
  EXPECT(status == SYNCBN_INVALID_ARGUMENT || status == SYNCBN_UNAVAILABLE);
  EXPECT(strstr(syncbn_last_error(), status == SYNCBN_UNAVAILABLE
                                         ? "CUDA"
                                         : "device: got a CUDA tensor, expected one on CPU") !=
         NULL);
  bad.v.x.device = bad.v.y.device = SYNCBN_CPU;

  REFUSED(syncbn_forward_begin(NULL, &bad.f, bad.message, NULL), "step: got NULL");
  REFUSED(syncbn_forward_begin(&bad.step, NULL, bad.message, NULL), "arguments: got NULL");
  REFUSED(syncbn_forward_begin(&bad.step, &bad.f, NULL, NULL), "message: got NULL");
  REFUSED(syncbn_forward_finish(&bad.step, &bad.f, NULL, NULL), "merged: got NULL");
  REFUSED(syncbn_backward_begin(&bad.step, &bad.b, NULL, NULL), "message: got NULL");
  REFUSED(syncbn_backward_finish(&bad.step, &bad.b, good.own, NULL, NULL), "merged: got NULL");
  REFUSED(syncbn_backward_finish(&bad.step, &bad.b, NULL, good.own, NULL), "own: got null");
  int64_t words = -1;
  REFUSED(syncbn_step_sizes(NULL, 0, &words, NULL, NULL), "x: got NULL");
  REFUSED(syncbn_step_sizes(bad.f.x, 2, &words, NULL, NULL), "statistics: got 2");
  EXPECT(words == -1);
  EXPECT_OK(syncbn_step_sizes(bad.f.x, SYNCBN_REPRODUCIBLE, NULL, &words, NULL));
  EXPECT(words == 8 + 19 * CHANNELS);

  EXPECT(memcmp(&good.r, &bad.r, sizeof(bad.r)) == 0);
  by_halves(&good, 1, SYNCBN_REPRODUCIBLE);
  by_halves(&bad, 1, SYNCBN_REPRODUCIBLE);
  EXPECT(memcmp(&good.r, &bad.r, sizeof(bad.r)) == 0);
}

void test_step_errors(void) {
  different_calls_are_an_error_on_every_rank();
  a_refused_argument_reaches_the_other_rank();
  a_backward_of_another_forward();
  bad_arguments_change_nothing();
}
