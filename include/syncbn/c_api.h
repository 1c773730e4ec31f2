// SPDX-License-Identifier: Apache-2.0
#ifndef SYNCBN_C_API_H
#define SYNCBN_C_API_H

/* The C interface of syncbn (C99), for other languages and frameworks. It has the layer of
   syncbn/batch_norm.hpp for tensors on the CPU, with the same bits. That header says what the
   functions compute; this one says how C calls them.

   A function that returns a syncbn_status returns SYNCBN_STATUS_OK, or the code of an error. After
   an error syncbn_last_error() returns a text, the caller must not rely on any output, and running
   statistics are unchanged. No C++ exception leaves a function.

   Where a comment says "or NULL", NULL means "absent". Elsewhere a NULL gives
   SYNCBN_STATUS_INVALID_ARGUMENT. Per-channel arrays have C entries. A struct that begins with
   struct_size may grow at its end. Set struct_size to sizeof of the struct; a wrong size gives
   SYNCBN_STATUS_INVALID_ARGUMENT. Set its pointers to NULL where you have nothing. Before 1.0 every
   minor version may change the structs and functions. */

#include <stddef.h>
#include <stdint.h>

#include "syncbn/export.h"
#include "syncbn/version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum syncbn_status {
  SYNCBN_STATUS_OK = 0,
  SYNCBN_STATUS_ERROR = 1,            /* an error without a code of its own */
  SYNCBN_STATUS_INVALID_ARGUMENT = 2, /* the text ends with "argument: got ..., expected ..." */
  SYNCBN_STATUS_DIVERGENCE = 3,       /* the ranks of an exchange did not make the same call */
  SYNCBN_STATUS_TIMEOUT = 4,          /* a rank did not come to an exchange in time */
  SYNCBN_STATUS_PEER_LOST = 5,        /* a rank refused its call, or left the group */
  SYNCBN_STATUS_UNAVAILABLE = 6,      /* not part of this build */
  SYNCBN_STATUS_OUT_OF_MEMORY = 7
} syncbn_status;

/* Returns the text of this thread's last failed call, or "" if none failed. The text is valid until
   the thread's next call of the library. */
SYNCBN_API const char* syncbn_last_error(void);
/* Returns the name of the layer whose call failed, or "" if the call was not a layer's. The name is
   valid as long as the text. */
SYNCBN_API const char* syncbn_last_error_layer(void);
/* Returns how many ranks did not come, have left, or made another call than rank 0, as far as this
   is known. Sets *ranks to the array of their numbers, which is valid as long as the text. */
SYNCBN_API int32_t syncbn_last_error_ranks(const int32_t** ranks);

/* Returns the version of the library as "MAJOR.MINOR.PATCH". The library may be newer than this
   header. The header's own version is in SYNCBN_VERSION_MAJOR, SYNCBN_VERSION_MINOR,
   SYNCBN_VERSION_PATCH and SYNCBN_VERSION_STRING. */
SYNCBN_API const char* syncbn_version(void);

/* Enumerations are passed as int32_t, so a wrong number is an error, not undefined behaviour. */
enum syncbn_dtype {
  SYNCBN_DTYPE_FLOAT16 = 0,
  SYNCBN_DTYPE_BFLOAT16 = 1,
  SYNCBN_DTYPE_FLOAT32 = 2,
  SYNCBN_DTYPE_FLOAT64 = 3
};
enum syncbn_device {
  SYNCBN_DEVICE_CPU = 0,
  SYNCBN_DEVICE_CUDA = 1
}; /* tensors on CUDA are refused */
enum syncbn_activation_kind {
  SYNCBN_ACTIVATION_NONE = 0,
  SYNCBN_ACTIVATION_RELU = 1,
  SYNCBN_ACTIVATION_LEAKY_RELU = 2
};
enum syncbn_statistics { SYNCBN_STATISTICS_REPRODUCIBLE = 0, SYNCBN_STATISTICS_WELFORD = 1 };
enum syncbn_affine_gradients {
  SYNCBN_AFFINE_GRADIENTS_SHARE = 0,
  SYNCBN_AFFINE_GRADIENTS_GLOBAL = 1
};

/* A tensor that the caller owns. A function writes only to its outputs. */
typedef struct syncbn_tensor {
  void* data;             /* element (0, ..., 0) */
  int32_t dtype;          /* enum syncbn_dtype */
  int32_t device;         /* enum syncbn_device */
  int32_t ndim;           /* x, y and gradients: 2 to 12 axes (N, C, spatial...); weight: 1 */
  const int64_t* sizes;   /* ndim sizes */
  const int64_t* strides; /* ndim strides in elements, or NULL: row-major */
} syncbn_tensor;

/* Says which elements of x count. The mask has contiguous bytes of shape (N, spatial...). A byte is
   0 if its element does not count. */
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

/* The threads that a call runs on. In every function a NULL executor means the calling thread
   alone. Results do not depend on the executor. */
typedef struct syncbn_executor syncbn_executor;

/* Makes a pool of `threads` threads (1 or more), including the calling thread. */
SYNCBN_API syncbn_status syncbn_thread_pool_create(int32_t threads, syncbn_executor** executor);

/* The caller's own threads. */
typedef struct syncbn_executor_functions {
  size_t struct_size;
  void* user_data;     /* the first argument of the function */
  int32_t concurrency; /* the most threads that parallel_for uses: 1 or more */
  /* Calls body(body_data, b, e) for disjoint ranges that together cover begin to end - 1. The calls
     may run at the same time, on any threads. Returns when all of them have ended. Each range has
     at least `grain` items where possible. */
  void (*parallel_for)(void* user_data, int64_t begin, int64_t end, int64_t grain,
                       void (*body)(void* body_data, int64_t begin, int64_t end), void* body_data);
} syncbn_executor_functions;

/* Makes an executor from the caller's functions. The struct is copied. */
SYNCBN_API syncbn_status syncbn_executor_create(const syncbn_executor_functions* functions,
                                                syncbn_executor** executor);

SYNCBN_API void syncbn_executor_destroy(syncbn_executor* executor); /* an executor, or NULL */

/* One rank's end of a group, with functions of the caller. They return a syncbn_status. If a
   function fails, its code becomes the code of the library's call that is under way. The function
   may first call syncbn_set_last_error; the text and ranks then also become those of the call. The
   exchange must then fail on every rank of the group, because the library does not tell the other
   ranks of the failure. No function may throw an exception or use longjmp. */
typedef struct syncbn_communicator {
  size_t struct_size;
  void* user_data; /* the first argument of the functions */
  int32_t rank;    /* 0 to size - 1 */
  int32_t size;    /* 1 to 2048 */
  /* Replaces words[i] by the sum of words[i] over all ranks, modulo 2^64. Ranks may bring different
     numbers of words, for example from different layers or dtypes. Return an error then; do not
     hang. */
  int32_t (*all_reduce_sum)(void* user_data, int64_t* words, int64_t count);
  /* Tells the other ranks that this rank will not come, because its arguments were refused or its
     own code failed. So the others need not wait. reason is a text for them. The function may be
     NULL. */
  void (*abandon)(void* user_data, const char* reason);
  /* Repairs the group after an error, for syncbn_group_reset, on every rank. The function may be
     NULL. */
  int32_t (*reset)(void* user_data);
} syncbn_communicator;

/* Returns the group of one rank. */
SYNCBN_API const syncbn_communicator* syncbn_self_communicator(void);

/* Sets the text and the ranks of an error, for a function of a communicator that is about to return
   this error. syncbn_last_error_ranks() then gives the `count` ranks. Text and ranks are copied.
   ranks: their numbers, or NULL if they are not known. */
SYNCBN_API void syncbn_set_last_error(const char* text, const int32_t* ranks, int32_t count);

/* A group, whose exchanges the library makes, or your functions. In all functions, `timeout` is how
   many milliseconds a rank waits for the others in an exchange: 1 to 2^40. syncbn/mpi_c_api.h has
   groups over MPI. */
typedef struct syncbn_group syncbn_group;

/* Makes a group whose ranks are threads of this process. The group has the ends of all ranks. */
SYNCBN_API syncbn_status syncbn_thread_group_create(int32_t size, int64_t timeout,
                                                    syncbn_group** group);

/* A function that writes the `bytes` bytes of every rank to `out`, in rank order, by any means. It
   returns a syncbn_status, as the functions of a communicator do. A reset of the group calls it
   again. */
typedef int32_t (*syncbn_gather)(void* user_data, const void* in, int64_t bytes, void* out);

/* Makes this process's rank of a group whose ranks are processes of one node. Every rank makes this
   call, and every rank calls `gather` equally often. If the ranks cannot share memory, every rank
   returns SYNCBN_STATUS_UNAVAILABLE, and the text says why. */
SYNCBN_API syncbn_status syncbn_shared_memory_group_create(int32_t rank, int32_t size,
                                                           syncbn_gather gather, void* user_data,
                                                           int64_t timeout, syncbn_group** group);

/* Makes this process's rank of a group of your functions, which are copied. A layer may also take
   the functions themselves. But only the layers of a group know of its reset. */
SYNCBN_API syncbn_status syncbn_group_create(const syncbn_communicator* functions,
                                             syncbn_group** group);

/* Repairs a broken group: makes it new, or calls `reset` of your functions. Every rank makes this
   call; for a group of threads one thread makes it, while no thread is in a call of the group. The
   ends stay valid, and their layers begin at call 0. If it fails, the group stays broken. */
SYNCBN_API syncbn_status syncbn_group_reset(syncbn_group* group);

/* Returns the end of rank `rank`, for one thread at a time. It is valid until the group is
   destroyed. Returns NULL if this process does not have that rank. */
SYNCBN_API const syncbn_communicator* syncbn_group_rank(const syncbn_group* group, int32_t rank);

/* Destroys a group, or does nothing for NULL. Ranks of other processes that wait for this process
   get SYNCBN_STATUS_PEER_LOST. */
SYNCBN_API void syncbn_group_destroy(syncbn_group* group);

/* ---- The layer ---- */

typedef struct syncbn_batch_norm_options {
  size_t struct_size;
  int64_t channels;           /* C, 0 to 2^31 */
  const char* name;           /* the layer's own, the same on all ranks; or NULL with one rank */
  double eps;                 /* finite, not negative */
  double momentum;            /* in [0, 1] */
  int32_t cumulative_average; /* 0, or 1: ignore momentum, average over num_batches_tracked */
  int32_t statistics;         /* enum syncbn_statistics */
  syncbn_activation activation;
} syncbn_batch_norm_options;

/* Default options, because 0 is a valid eps and momentum. Set channels: without it a layer is
   refused. */
#define SYNCBN_BATCH_NORM_OPTIONS_INIT \
  {sizeof(syncbn_batch_norm_options), INT64_MIN, NULL, 1e-5, 0.1, 0, 0, {0, 0.01}}

/* One layer of one rank. All ranks make the same calls of the layer. Only one thread at a time may
   call a layer. Layers that share a communicator belong to one thread. */
typedef struct syncbn_batch_norm syncbn_batch_norm;

/* Makes a layer. options and communicator are copied. The memory that the communicator's functions
   use must outlive the layer, and so must the group that the communicator comes from. */
SYNCBN_API syncbn_status syncbn_batch_norm_create(const syncbn_batch_norm_options* options,
                                                  const syncbn_communicator* communicator,
                                                  syncbn_batch_norm** layer);

SYNCBN_API void syncbn_batch_norm_destroy(syncbn_batch_norm* layer); /* a layer, or NULL */

/* Sets the options momentum and cumulative_average of the forwards that follow. The ranks may have
   different values. A refused value changes nothing. */
SYNCBN_API syncbn_status syncbn_batch_norm_set_momentum(syncbn_batch_norm* layer, double momentum,
                                                        int32_t cumulative_average);

/* The results of a forward that its backward needs. Keep one syncbn_saved for each forward whose
   backward is still to come, and use it again for later forwards. A forward that fails leaves its
   syncbn_saved empty. */
typedef struct syncbn_saved syncbn_saved;

/* Makes an empty syncbn_saved. */
SYNCBN_API syncbn_status syncbn_saved_create(syncbn_saved** saved);
SYNCBN_API void syncbn_saved_destroy(syncbn_saved* saved); /* a syncbn_saved, or NULL */

/* These functions return statistics of the whole batch, with the same bits on every rank. They
   return 0 and NULL if `saved` is empty. */
SYNCBN_API int64_t syncbn_saved_channels(const syncbn_saved* saved);
SYNCBN_API int64_t syncbn_saved_count(const syncbn_saved* saved); /* elements per channel */
SYNCBN_API const double* syncbn_saved_mean(const syncbn_saved* saved);
SYNCBN_API const double* syncbn_saved_var(const syncbn_saved* saved); /* biased */
SYNCBN_API const double* syncbn_saved_rstd(const syncbn_saved* saved);

/* x and y are required; the other members may be NULL. */
typedef struct syncbn_forward_arguments {
  size_t struct_size;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* residual;
  const syncbn_tensor* y; /* an output, like the next three */
  const syncbn_tensor* running_mean;
  const syncbn_tensor* running_var;
  int64_t* num_batches_tracked;
} syncbn_forward_arguments;

/* Computes y for training, as BatchNorm::forward of syncbn/batch_norm.hpp does. */
SYNCBN_API syncbn_status syncbn_batch_norm_forward(syncbn_batch_norm* layer,
                                                   const syncbn_forward_arguments* arguments,
                                                   syncbn_saved* saved, syncbn_executor* executor);

/* dy, x and dx are required; the other tensors may be NULL. */
typedef struct syncbn_backward_arguments {
  size_t struct_size;
  const syncbn_tensor* dy;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* dx; /* an output, like the next three */
  const syncbn_tensor* dweight;
  const syncbn_tensor* dbias;
  const syncbn_tensor* dresidual;
  int32_t affine; /* enum syncbn_affine_gradients */
} syncbn_backward_arguments;

/* Computes the gradients of the forward that filled `saved`, as BatchNorm::backward does. */
SYNCBN_API syncbn_status syncbn_batch_norm_backward(syncbn_batch_norm* layer,
                                                    const syncbn_backward_arguments* arguments,
                                                    const syncbn_saved* saved,
                                                    syncbn_executor* executor);

/* x and y are required; the other members may be NULL. Give both running statistics or neither. */
typedef struct syncbn_evaluate_arguments {
  size_t struct_size;
  const syncbn_tensor* x;
  const syncbn_mask* mask;
  const syncbn_tensor* weight;
  const syncbn_tensor* bias;
  const syncbn_tensor* residual;
  const syncbn_tensor* running_mean;
  const syncbn_tensor* running_var;
  const syncbn_tensor* y; /* the output */
} syncbn_evaluate_arguments;

/* Computes y for evaluation, without an exchange, as BatchNorm::evaluate does. */
SYNCBN_API syncbn_status syncbn_batch_norm_evaluate(syncbn_batch_norm* layer,
                                                    const syncbn_evaluate_arguments* arguments,
                                                    syncbn_executor* executor);

/* dy, x, running_mean, running_var and dx are required; the other members may be NULL. */
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
  const syncbn_tensor* dx; /* an output, like the next three */
  const syncbn_tensor* dweight;
  const syncbn_tensor* dbias;
  const syncbn_tensor* dresidual;
} syncbn_evaluate_backward_arguments;

/* Computes the gradients of an evaluation, as BatchNorm::evaluate_backward does. */
SYNCBN_API syncbn_status syncbn_batch_norm_evaluate_backward(
    syncbn_batch_norm* layer, const syncbn_evaluate_backward_arguments* arguments,
    syncbn_executor* executor);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_C_API_H */
