// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_C_API_H
#define SYNCBN_C_API_H

/* The C interface of syncbn (C99), for other languages and frameworks: the layer of
   syncbn/batch_norm.hpp for tensors on CPU, with the same bits. What a function computes is said
   there; here is how C calls it.

   Each function that returns a syncbn_status returns SYNCBN_OK or a code; then
   syncbn_last_error() has a text, no output was written that a caller may rely on, and running
   statistics are unchanged. No C++ exception leaves a function.

   Where a comment says "or NULL", NULL stands for absent; elsewhere it is SYNCBN_INVALID_ARGUMENT.
   Per-channel arrays have C entries. A struct that begins with struct_size may grow at its end: set
   that member to sizeof of the struct, and other pointers to NULL where you have nothing. A wrong
   size is SYNCBN_INVALID_ARGUMENT. Before 1.0 every minor version may change the structs and
   functions. */

#include <stddef.h>
#include <stdint.h>

#include "syncbn/export.hpp"
#include "syncbn/version.hpp"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum syncbn_status {
  SYNCBN_OK = 0,
  SYNCBN_ERROR = 1,            /* anything that has no code of its own */
  SYNCBN_INVALID_ARGUMENT = 2, /* the text ends with "argument: got ..., expected ..." */
  SYNCBN_DIVERGENCE = 3,       /* the ranks of an exchange did not make the same call */
  SYNCBN_TIMEOUT = 4,          /* a rank did not come to an exchange in time */
  SYNCBN_PEER_LOST = 5,        /* a rank left the group */
  SYNCBN_UNAVAILABLE = 6,      /* not part of this build */
  SYNCBN_OUT_OF_MEMORY = 7
} syncbn_status;

/* The text of this thread's last failed call, valid until the thread's next call of the library;
   "" if none failed. */
SYNCBN_API const char* syncbn_last_error(void);
/* The name of the layer that was called; "" outside layers. Valid as the text is. */
SYNCBN_API const char* syncbn_last_error_layer(void);
/* How many ranks did not come, have left, or made another call than rank 0, as far as known; *ranks
   becomes their array, valid as the text is. */
SYNCBN_API int32_t syncbn_last_error_ranks(const int32_t** ranks);

/* "MAJOR.MINOR.PATCH" of the library, which may be newer than this header. The header's own
   version: SYNCBN_VERSION_MAJOR, SYNCBN_VERSION_MINOR, SYNCBN_VERSION_PATCH, SYNCBN_VERSION_STRING.
 */
SYNCBN_API const char* syncbn_version(void);

/* Enumerations are passed as int32_t, so that a wrong number is an error and not undefined. */
enum syncbn_dtype {
  SYNCBN_FLOAT16 = 0,
  SYNCBN_BFLOAT16 = 1,
  SYNCBN_FLOAT32 = 2,
  SYNCBN_FLOAT64 = 3
};
enum syncbn_device { SYNCBN_CPU = 0, SYNCBN_CUDA = 1 }; /* tensors on CUDA are refused */
enum syncbn_activation_kind { SYNCBN_NONE = 0, SYNCBN_RELU = 1, SYNCBN_LEAKY_RELU = 2 };
enum syncbn_statistics { SYNCBN_REPRODUCIBLE = 0, SYNCBN_WELFORD = 1 };
enum syncbn_affine_gradients { SYNCBN_SHARE = 0, SYNCBN_GLOBAL = 1 };

/* A tensor of the caller's. Functions write only to those that are outputs. */
typedef struct syncbn_tensor {
  void* data;             /* element (0, ..., 0) */
  int32_t dtype;          /* enum syncbn_dtype */
  int32_t device;         /* enum syncbn_device */
  int32_t ndim;           /* x, y and gradients: 2 to 12 axes (N, C, spatial...); weight: 1 */
  const int64_t* sizes;   /* ndim sizes */
  const int64_t* strides; /* ndim strides in elements, or NULL: row-major */
} syncbn_tensor;

/* Which elements of x count: contiguous bytes of shape (N, spatial...), 0 for one that does not. */
typedef struct syncbn_mask {
  const uint8_t* data;
  int32_t device; /* enum syncbn_device */
  int32_t ndim;
  const int64_t* sizes; /* ndim sizes */
} syncbn_mask;

typedef struct syncbn_activation {
  int32_t kind; /* enum syncbn_activation_kind */
  double negative_slope;
} syncbn_activation;

/* Threads that passes run on; everywhere NULL is the calling thread alone. Results do not depend
   on it. */
typedef struct syncbn_executor syncbn_executor;

/* A pool of `threads` threads, the calling one included: 1 or more. */
SYNCBN_API syncbn_status syncbn_thread_pool_create(int32_t threads, syncbn_executor** executor);

/* Threads of the caller's. */
typedef struct syncbn_executor_functions {
  size_t struct_size;
  void* user_data;     /* handed to the function */
  int32_t concurrency; /* how many threads parallel_for uses at most: 1 or more */
  /* Calls body(body_data, b, e) on disjoint ranges that cover begin to end - 1, possibly at the
     same time and on any threads, and returns when all are done. Ranges have at least `grain` items
     where possible. */
  void (*parallel_for)(void* user_data, int64_t begin, int64_t end, int64_t grain,
                       void (*body)(void* body_data, int64_t begin, int64_t end), void* body_data);
} syncbn_executor_functions;

/* functions: copied. */
SYNCBN_API syncbn_status syncbn_executor_create(const syncbn_executor_functions* functions,
                                                syncbn_executor** executor);

SYNCBN_API void syncbn_executor_destroy(syncbn_executor* executor); /* or NULL */

/* One rank's end of a group; the functions are the caller's. They return a syncbn_status; one that
   fails may call syncbn_set_last_error first, and its text, ranks and code become those of the call
   that is under way. Every rank of the group must then fail, or what the others do is up to the
   functions. No function may throw or jump out. */
typedef struct syncbn_communicator {
  size_t struct_size;
  void* user_data; /* handed to the functions */
  int32_t rank;    /* 0 to size - 1 */
  int32_t size;    /* 1 to 2048 */
  /* words[i] becomes the sum over ranks of words[i], modulo 2^64. Ranks may bring different
     numbers of words (another layer or dtype); better an error then than a hang. */
  int32_t (*all_reduce_sum)(void* user_data, int64_t* words, int64_t count);
  /* out becomes every rank's `bytes` bytes in rank order: size * bytes. Used with SYNCBN_WELFORD
     alone; NULL without it is fine. */
  int32_t (*all_gather)(void* user_data, const void* in, int64_t bytes, void* out);
  /* Tells the other ranks that this one will not come (its arguments were refused), so that they
     need not wait. Or NULL. */
  void (*abandon)(void* user_data, const char* reason);
} syncbn_communicator;

/* The group of one rank. */
SYNCBN_API const syncbn_communicator* syncbn_self_communicator(void);

/* For functions of a communicator: the text of the error that they are about to return, and the
   `count` ranks that it is about, which syncbn_last_error_ranks() then gives. Both are copied.
   ranks: or NULL where nobody knows. */
SYNCBN_API void syncbn_set_last_error(const char* text, const int32_t* ranks, int32_t count);

/* A group of the library's. timeout, everywhere: how many milliseconds a rank waits for the others
   in an exchange, 1 to 2^40. Groups over MPI: syncbn/mpi_c_api.h. */
typedef struct syncbn_group syncbn_group;

/* All ranks, which are threads of this process. */
SYNCBN_API syncbn_status syncbn_thread_group_create(int32_t size, int64_t timeout,
                                                    syncbn_group** group);

/* Puts every rank's `bytes` bytes into out, in rank order, by any means. Returns a syncbn_status,
   as the functions of a communicator do. */
typedef int32_t (*syncbn_gather)(void* user_data, const void* in, int64_t bytes, void* out);

/* This process's rank of a group whose ranks are processes of one node. Every rank makes this call,
   and in it the same calls of `gather`. SYNCBN_UNAVAILABLE on every rank where they cannot share
   memory; the text says why. */
SYNCBN_API syncbn_status syncbn_shared_memory_group_create(int32_t rank, int32_t size,
                                                           syncbn_gather gather, void* user_data,
                                                           int64_t timeout, syncbn_group** group);

/* That rank's end, good until the group is destroyed, for one thread at a time; NULL for a rank
   that this process does not have. */
SYNCBN_API const syncbn_communicator* syncbn_group_rank(const syncbn_group* group, int32_t rank);

/* Ranks of other processes that wait for this one get SYNCBN_PEER_LOST. */
SYNCBN_API void syncbn_group_destroy(syncbn_group* group); /* or NULL */

/* ---- The layer ---- */

typedef struct syncbn_batch_norm_options {
  size_t struct_size;
  int64_t channels;           /* C */
  const char* name;           /* the layer's own, the same on all ranks; NULL: a group of one */
  double eps;                 /* finite, not negative */
  double momentum;            /* in [0, 1] */
  int32_t cumulative_average; /* 1: momentum is not looked at, num_batches_tracked decides */
  int32_t statistics;         /* enum syncbn_statistics */
  syncbn_activation activation;
} syncbn_batch_norm_options;

/* What to begin with, as 0 is a value of eps and of momentum; channels is still 0. */
#define SYNCBN_BATCH_NORM_OPTIONS_INIT \
  {sizeof(syncbn_batch_norm_options), 0, NULL, 1e-5, 0.1, 0, 0, {0, 0.01}}

/* One layer of one rank; all ranks make the same calls of it. One thread at a time calls it, and
   one thread all layers that share a communicator. */
typedef struct syncbn_batch_norm syncbn_batch_norm;

/* options, communicator: copied. What the communicator's functions use, or the group that it is an
   end of, outlives the layer. */
SYNCBN_API syncbn_status syncbn_batch_norm_create(const syncbn_batch_norm_options* options,
                                                  const syncbn_communicator* communicator,
                                                  syncbn_batch_norm** layer);

SYNCBN_API void syncbn_batch_norm_destroy(syncbn_batch_norm* layer); /* or NULL */

/* The options of these names, for the forwards that follow; one that is refused changes nothing.
   Ranks need not agree on them. */
SYNCBN_API syncbn_status syncbn_batch_norm_set_momentum(syncbn_batch_norm* layer, double momentum,
                                                        int32_t cumulative_average);

/* What a forward hands to its backward: one for each forward whose backward is to come, used again
   for later forwards. A forward that fails leaves it without content. */
typedef struct syncbn_saved syncbn_saved;

SYNCBN_API syncbn_status syncbn_saved_create(syncbn_saved** saved);
SYNCBN_API void syncbn_saved_destroy(syncbn_saved* saved); /* or NULL */

/* Statistics of the whole batch, the same bits on every rank; 0 and NULL without content. */
SYNCBN_API int64_t syncbn_saved_channels(const syncbn_saved* saved);
SYNCBN_API int64_t syncbn_saved_count(const syncbn_saved* saved); /* elements per channel */
SYNCBN_API const double* syncbn_saved_mean(const syncbn_saved* saved);
SYNCBN_API const double* syncbn_saved_var(const syncbn_saved* saved); /* biased */
SYNCBN_API const double* syncbn_saved_rstd(const syncbn_saved* saved);

/* x and y are needed; the others may be NULL. */
typedef struct syncbn_forward_arguments {
  size_t struct_size;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* residual;
  const syncbn_tensor* y; /* written, as the next three */
  const syncbn_tensor* running_mean;
  const syncbn_tensor* running_var;
  int64_t* num_batches_tracked;
} syncbn_forward_arguments;

SYNCBN_API syncbn_status syncbn_batch_norm_forward(syncbn_batch_norm* layer,
                                                   const syncbn_forward_arguments* arguments,
                                                   syncbn_saved* saved, syncbn_executor* executor);

/* dy, x and dx are needed; the other tensors may be NULL. */
typedef struct syncbn_backward_arguments {
  size_t struct_size;
  const syncbn_tensor* dy;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* dx; /* written, as the next three */
  const syncbn_tensor* dweight;
  const syncbn_tensor* dbias;
  const syncbn_tensor* dresidual;
  int32_t affine; /* enum syncbn_affine_gradients */
} syncbn_backward_arguments;

SYNCBN_API syncbn_status syncbn_batch_norm_backward(syncbn_batch_norm* layer,
                                                    const syncbn_backward_arguments* arguments,
                                                    const syncbn_saved* saved,
                                                    syncbn_executor* executor);

/* x and y are needed; the others may be NULL, running_* only together. */
typedef struct syncbn_evaluate_arguments {
  size_t struct_size;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* residual;
  const syncbn_tensor* running_mean;
  const syncbn_tensor* running_var;
  const syncbn_tensor* y; /* written */
} syncbn_evaluate_arguments;

SYNCBN_API syncbn_status syncbn_batch_norm_evaluate(syncbn_batch_norm* layer,
                                                    const syncbn_evaluate_arguments* arguments,
                                                    syncbn_executor* executor);

/* dy, x, running_* and dx are needed; the others may be NULL. */
typedef struct syncbn_evaluate_backward_arguments {
  size_t struct_size;
  const syncbn_tensor* dy;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* residual;
  const syncbn_tensor* running_mean;
  const syncbn_tensor* running_var;
  const syncbn_tensor* dx; /* written, as the next three */
  const syncbn_tensor* dweight;
  const syncbn_tensor* dbias;
  const syncbn_tensor* dresidual;
} syncbn_evaluate_backward_arguments;

SYNCBN_API syncbn_status syncbn_batch_norm_evaluate_backward(
    syncbn_batch_norm* layer, const syncbn_evaluate_backward_arguments* arguments,
    syncbn_executor* executor);

/* ---- A layer's calls in two halves, for those who own the exchange ---- */

/* begin writes this rank's message. The caller adds up the messages of all ranks, word by word
   modulo 2^64: any SUM all-reduce of int64, at any time, in any way. finish makes statistics of the
   sum and writes the outputs. Both halves get the same step and arguments, whose memory is left
   alone in between. They compute, check and refuse what the layer's call does, but for this: what
   outlives a call is in the step, so nobody compares a backward with its forward. With another x,
   mask, weight, bias or activation than the forward's, dx is wrong, and no error says so.

   A begin that fails writes into `message`, unless it is NULL, that this rank refuses. Send it all
   the same: finish is SYNCBN_DIVERGENCE on the others then, as it is on all ranks if they did not
   make the same call. */
typedef struct syncbn_step {
  size_t struct_size;
  const syncbn_batch_norm_options* options; /* the layer's; name is needed where ranks > 1 */
  int32_t ranks;                            /* of the group: 1 to 2048 */
  /* A forward: which call of the layer it is, the same on all ranks. finish adds 1, but not if it
     is SYNCBN_INVALID_ARGUMENT or SYNCBN_DIVERGENCE. A backward does not look at it. */
  int64_t* call;
  /* A forward writes these for its backward; they have C entries. */
  double* mean;
  double* var; /* biased; a backward does not look at it */
  double* rstd;
  int64_t* info; /* 2 words: elements per channel over all ranks, and what marks the call */
  /* Written, too; as large as syncbn_step_sizes says. Or NULL without a residual or without an
     activation. */
  uint8_t* activation_mask;
} syncbn_step;

/* How large for this x a message is, in words, and an activation mask, in bytes. Each of the three
   may be NULL. statistics: enum syncbn_statistics. Ranks without samples bring an x of the others'
   dtype. */
SYNCBN_API syncbn_status syncbn_step_sizes(const syncbn_tensor* x, int32_t statistics,
                                           int64_t* forward_words, int64_t* backward_words,
                                           int64_t* activation_mask_bytes);

SYNCBN_API syncbn_status syncbn_forward_begin(const syncbn_step* step,
                                              const syncbn_forward_arguments* arguments,
                                              int64_t* message, syncbn_executor* executor);

/* merged: the sum of the messages. With SYNCBN_WELFORD that of their first 8 words, and after it
   the other words of all ranks, in rank order. After SYNCBN_OUT_OF_MEMORY `call` and running
   statistics may be updated, as on the other ranks. */
SYNCBN_API syncbn_status syncbn_forward_finish(const syncbn_step* step,
                                               const syncbn_forward_arguments* arguments,
                                               const int64_t* merged, syncbn_executor* executor);

/* Writes dresidual. */
SYNCBN_API syncbn_status syncbn_backward_begin(const syncbn_step* step,
                                               const syncbn_backward_arguments* arguments,
                                               int64_t* message, syncbn_executor* executor);

/* own: the message that this rank sent, of which its share of dweight and dbias is made; or NULL
   with SYNCBN_GLOBAL or without both. */
SYNCBN_API syncbn_status syncbn_backward_finish(const syncbn_step* step,
                                                const syncbn_backward_arguments* arguments,
                                                const int64_t* own, const int64_t* merged,
                                                syncbn_executor* executor);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_C_API_H */
