#ifndef SYNCBN_C_API_H
#define SYNCBN_C_API_H

/* The C interface of syncbn (C99), for other languages and frameworks: the layer of
   syncbn/batch_norm.hpp and the passes of syncbn/passes.hpp for tensors on CPU, with the same bits.
   What a function computes is said there; here is how C calls it.

   Each function that returns a syncbn_status returns SYNCBN_OK or a code; then
   syncbn_last_error() has a text, no output was written that a caller may rely on, and running
   statistics are unchanged. No C++ exception leaves a function.

   Where a comment says "or NULL", NULL stands for absent; elsewhere it is SYNCBN_INVALID_ARGUMENT.
   Per-channel arrays have C entries. Argument order: inputs, outputs, sizes, options, execution.
   Before 1.0 every minor version may change the structs and functions. */

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
  SYNCBN_INVALID_ARGUMENT = 2, /* the text is "argument: got ..., expected ..." */
  SYNCBN_DIVERGENCE = 3,       /* the ranks of an exchange did not make the same call */
  SYNCBN_TIMEOUT = 4,          /* a rank did not come to an exchange in time */
  SYNCBN_PEER_LOST = 5,        /* a rank left the group */
  SYNCBN_UNAVAILABLE = 6,      /* not part of this build */
  SYNCBN_OUT_OF_MEMORY = 7
} syncbn_status;

/* The text of this thread's last failed call, valid until the thread's next call of the library;
   "" if none failed. */
SYNCBN_API const char* syncbn_last_error(void);

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
enum syncbn_direction { SYNCBN_FORWARD = 0, SYNCBN_BACKWARD = 1 };
enum syncbn_activation_kind { SYNCBN_NONE = 0, SYNCBN_RELU = 1, SYNCBN_LEAKY_RELU = 2 };
enum syncbn_statistics { SYNCBN_REPRODUCIBLE = 0, SYNCBN_WELFORD = 1 };
enum syncbn_affine_gradients { SYNCBN_SHARE = 0, SYNCBN_GLOBAL = 1 };

/* Words in front of the channels' words of a message. */
#define SYNCBN_HEADER_WORDS 8

/* A tensor of the caller's. Functions write only to those that are outputs. */
typedef struct syncbn_tensor {
  void* data;             /* element (0, ..., 0) */
  int32_t dtype;          /* enum syncbn_dtype */
  int32_t device;         /* enum syncbn_device */
  int32_t ndim;           /* x, y and gradients: 2 or more axes (N, C, spatial...); weight: 1 */
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

/* How a gradient comes back through the activation: see ActivationGradient in syncbn/passes.hpp. */
typedef struct syncbn_activation_gradient {
  syncbn_activation activation;
  const syncbn_tensor* weight;    /* or NULL */
  const syncbn_tensor* bias;      /* or NULL */
  const uint8_t* activation_mask; /* or NULL */
} syncbn_activation_gradient;

/* Threads that passes run on; everywhere NULL is the calling thread alone. Results do not depend
   on it. */
typedef struct syncbn_executor syncbn_executor;

/* A pool of `threads` threads, the calling one included: 1 or more. */
SYNCBN_API syncbn_status syncbn_thread_pool_create(int32_t threads, syncbn_executor** executor);

/* Threads of the caller's. */
typedef struct syncbn_executor_functions {
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
   fails may call syncbn_set_last_error first, and its text and code become those of the call that
   is under way. Every rank of the group must then fail, or what the others do is up to the
   functions. No function may throw or jump out. */
typedef struct syncbn_communicator {
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

/* For functions of a communicator: the text of the error that they are about to return. */
SYNCBN_API void syncbn_set_last_error(const char* text);

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

/* ---- The layer: one call per direction; see syncbn/batch_norm.hpp ---- */

typedef struct syncbn_batch_norm_options {
  double eps;
  double momentum;            /* in [0, 1] */
  int32_t cumulative_average; /* 1: momentum is not looked at, num_batches_tracked decides */
  int32_t statistics;         /* enum syncbn_statistics */
  uint64_t layer;             /* the caller's number for this layer; with several ranks not 0 */
  uint64_t call;              /* how many calls of it came before; 0: they meet in their order */
  syncbn_activation activation;
} syncbn_batch_norm_options;

/* eps 1e-5, momentum 0.1, negative_slope 0.01, and 0 for the rest. */
SYNCBN_API void syncbn_batch_norm_options_init(syncbn_batch_norm_options* options);

/* What a forward hands to its backward. The same bits on every rank. */
typedef struct syncbn_batch_statistics syncbn_batch_statistics;

SYNCBN_API void syncbn_batch_statistics_destroy(syncbn_batch_statistics* statistics); /* or NULL */
SYNCBN_API int64_t syncbn_batch_statistics_channels(const syncbn_batch_statistics* statistics);
SYNCBN_API int64_t syncbn_batch_statistics_count(const syncbn_batch_statistics* statistics);
SYNCBN_API const double* syncbn_batch_statistics_mean(const syncbn_batch_statistics* statistics);
SYNCBN_API const double* syncbn_batch_statistics_var(const syncbn_batch_statistics* statistics);
SYNCBN_API const double* syncbn_batch_statistics_rstd(const syncbn_batch_statistics* statistics);

/* mask, weight, bias, residual, running_*, num_batches_tracked: or NULL. *statistics: a new object,
   to be destroyed by the caller; left alone on an error. */
SYNCBN_API syncbn_status syncbn_batch_norm_forward(
    const syncbn_tensor* x, const syncbn_mask* mask, const syncbn_tensor* weight,
    const syncbn_tensor* bias, const syncbn_tensor* residual, const syncbn_tensor* y,
    const syncbn_tensor* running_mean, const syncbn_tensor* running_var,
    int64_t* num_batches_tracked, syncbn_batch_statistics** statistics,
    const syncbn_batch_norm_options* options, const syncbn_communicator* communicator,
    syncbn_executor* executor);

/* mask, weight, bias, dweight, dbias, dresidual: or NULL. affine: enum syncbn_affine_gradients. */
SYNCBN_API syncbn_status syncbn_batch_norm_backward(
    const syncbn_tensor* dy, const syncbn_tensor* x, const syncbn_mask* mask,
    const syncbn_tensor* weight, const syncbn_tensor* bias,
    const syncbn_batch_statistics* statistics, const syncbn_tensor* dx,
    const syncbn_tensor* dweight, const syncbn_tensor* dbias, const syncbn_tensor* dresidual,
    int32_t affine, const syncbn_communicator* communicator, syncbn_executor* executor);

/* mask, weight, bias, residual, and both of running_*: or NULL. No exchange. */
SYNCBN_API syncbn_status syncbn_batch_norm_evaluate(
    const syncbn_tensor* x, const syncbn_mask* mask, const syncbn_tensor* weight,
    const syncbn_tensor* bias, const syncbn_tensor* residual, const syncbn_tensor* running_mean,
    const syncbn_tensor* running_var, const syncbn_tensor* y,
    const syncbn_batch_norm_options* options, syncbn_executor* executor);

/* Backward of syncbn_batch_norm_evaluate with running statistics: dweight and dbias are local sums.
   mask, weight, bias, residual, dweight, dbias, dresidual: or NULL. No exchange. */
SYNCBN_API syncbn_status syncbn_batch_norm_evaluate_backward(
    const syncbn_tensor* dy, const syncbn_tensor* x, const syncbn_mask* mask,
    const syncbn_tensor* weight, const syncbn_tensor* bias, const syncbn_tensor* residual,
    const syncbn_tensor* running_mean, const syncbn_tensor* running_var, const syncbn_tensor* dx,
    const syncbn_tensor* dweight, const syncbn_tensor* dbias, const syncbn_tensor* dresidual,
    const syncbn_batch_norm_options* options, syncbn_executor* executor);

/* ---- The passes, for those who own the exchange; see syncbn/passes.hpp ---- */

SYNCBN_API syncbn_status syncbn_words_per_channel(int32_t dtype, int32_t* words);
SYNCBN_API syncbn_status syncbn_message_words(int32_t dtype, int64_t channels, int64_t* words);
SYNCBN_API syncbn_status syncbn_activation_mask_bytes(const syncbn_tensor* x, int64_t* bytes);

/* 20 bits that all ranks of one exchange must share; direction: enum syncbn_direction. */
SYNCBN_API syncbn_status syncbn_fingerprint(uint64_t layer, uint64_t call, int32_t direction,
                                            int64_t channels, double eps, uint32_t* fingerprint);

/* What the header of a summed message says; agree, any_rejected, any_data: 0 or 1. */
typedef struct syncbn_message_info {
  int64_t count;
  int32_t agree;
  int32_t any_rejected;
  int32_t any_data;
  int32_t dtype; /* enum syncbn_dtype */
} syncbn_message_info;

SYNCBN_API syncbn_status syncbn_read_header(const int64_t* merged, int32_t ranks,
                                            syncbn_message_info* info);
/* SYNCBN_DIVERGENCE unless all ranks agree. */
SYNCBN_API syncbn_status syncbn_check_header(const syncbn_message_info* info);
/* message: SYNCBN_HEADER_WORDS words, what a rank sends whose own input was refused. */
SYNCBN_API syncbn_status syncbn_rejection_header(uint32_t fingerprint, int64_t* message);

/* mask: or NULL. message: syncbn_message_words(dtype of x, C) words. */
SYNCBN_API syncbn_status syncbn_local_moments(const syncbn_tensor* x, const syncbn_mask* mask,
                                              int64_t* message, uint32_t fingerprint,
                                              syncbn_executor* executor);

/* words: a summed message behind its header. */
SYNCBN_API syncbn_status syncbn_finalize_moments(const syncbn_message_info* info,
                                                 const int64_t* words, double* mean, double* var,
                                                 double* rstd, int64_t channels, double eps,
                                                 syncbn_executor* executor);

/* mask, weight, bias, residual, activation_mask, activation: or NULL. */
SYNCBN_API syncbn_status syncbn_normalize(const syncbn_tensor* x, const syncbn_mask* mask,
                                          const double* mean, const double* rstd,
                                          const syncbn_tensor* weight, const syncbn_tensor* bias,
                                          const syncbn_tensor* residual, const syncbn_tensor* y,
                                          uint8_t* activation_mask,
                                          const syncbn_activation* activation,
                                          syncbn_executor* executor);

/* running_mean, running_var: or NULL. factor: in [0, 1]. */
SYNCBN_API syncbn_status syncbn_update_running_statistics(const syncbn_tensor* running_mean,
                                                          const syncbn_tensor* running_var,
                                                          const double* mean, const double* var,
                                                          int64_t channels, int64_t count,
                                                          double factor);

/* mask, through, u: or NULL. fingerprint: with SYNCBN_BACKWARD. */
SYNCBN_API syncbn_status syncbn_local_gradients(const syncbn_tensor* dy, const syncbn_tensor* x,
                                                const syncbn_mask* mask, const double* mean,
                                                const double* rstd,
                                                const syncbn_activation_gradient* through,
                                                const syncbn_tensor* u, int64_t* message,
                                                uint32_t fingerprint, syncbn_executor* executor);

/* weight, dweight, dbias: or NULL. coefficients: 3 * C. count: as forward had it. */
SYNCBN_API syncbn_status syncbn_finalize_gradients(
    const syncbn_message_info* info, const int64_t* words, const double* mean, const double* rstd,
    const syncbn_tensor* weight, double* coefficients, const syncbn_tensor* dweight,
    const syncbn_tensor* dbias, int64_t channels, int64_t count, syncbn_executor* executor);

/* words: this rank's own message behind its header, of `dtype`. dweight, dbias: or NULL. */
SYNCBN_API syncbn_status syncbn_affine_gradient_shares(const int64_t* words, int32_t dtype,
                                                       const double* mean, const double* rstd,
                                                       const syncbn_tensor* dweight,
                                                       const syncbn_tensor* dbias, int64_t channels,
                                                       syncbn_executor* executor);

/* mask, through: or NULL. */
SYNCBN_API syncbn_status syncbn_input_gradient(const syncbn_tensor* dy, const syncbn_tensor* x,
                                               const syncbn_mask* mask, const double* mean,
                                               const double* rstd, const double* coefficients,
                                               const syncbn_activation_gradient* through,
                                               const syncbn_tensor* dx, syncbn_executor* executor);

/* x from y = leaky_relu(normalized x) of syncbn_normalize, without a mask, up to rounding; x may be
   y. weight, bias: or NULL. activation_mask: syncbn_activation_mask_bytes(y) bytes, written. */
SYNCBN_API syncbn_status syncbn_recover_input(const syncbn_tensor* y, const double* mean,
                                              const double* rstd, const syncbn_tensor* weight,
                                              const syncbn_tensor* bias, const syncbn_tensor* x,
                                              uint8_t* activation_mask, double negative_slope,
                                              syncbn_executor* executor);

/* dx = weight * rstd * u, the gradient of syncbn_normalize with constant statistics; u: dy come
   back through the activation. mask, weight: or NULL. */
SYNCBN_API syncbn_status syncbn_evaluation_input_gradient(
    const syncbn_tensor* u, const syncbn_mask* mask, const double* rstd,
    const syncbn_tensor* weight, const syncbn_tensor* dx, syncbn_executor* executor);

/* ---- The passes of SYNCBN_WELFORD; see syncbn/welford.hpp ---- */

/* Of a rank's record, which stands behind the message's header. */
SYNCBN_API syncbn_status syncbn_welford_words(int32_t dtype, int64_t channels, int64_t* words);

/* mask: or NULL. message: SYNCBN_HEADER_WORDS and syncbn_welford_words(dtype of x, C) words. */
SYNCBN_API syncbn_status syncbn_local_welford(const syncbn_tensor* x, const syncbn_mask* mask,
                                              int64_t* message, uint32_t fingerprint,
                                              syncbn_executor* executor);

/* info: of the headers' sum. records: that of rank r begins at stride * r. */
SYNCBN_API syncbn_status syncbn_merge_welford(const syncbn_message_info* info,
                                              const int64_t* records, double* mean, double* var,
                                              double* rstd, int64_t channels, int32_t ranks,
                                              int64_t stride, double eps);

#ifdef __cplusplus
}
#endif

#endif /* SYNCBN_C_API_H */
