#pragma once

#include <cstdint>

#include "sample_view.hpp"
#include "syncbn/executor.hpp"
#include "syncbn/tensor.hpp"

// The passes on CPU. Arguments have been checked; tensors are not empty.
namespace syncbn::cpu {

/// Words of the sums of u and u*v per channel; v = u if null.
void local_sums(const SampleView& u, const SampleView* v, std::int64_t* words, Executor& executor);

/// Channel constants, from which each element-wise pass derives its own.
struct NormalizeConstants {
  const double* mean;
  const double* rstd;
  const double* weight;  ///< as binary64
  const double* bias;
};
void normalize(const SampleView& x, const SampleView& y, const NormalizeConstants& constants,
               Executor& executor);

struct GradientConstants {
  const double* mean;
  const double* rstd;
  const double* c1;
  const double* c2;
  const double* c3;
};
void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, Executor& executor);
void evaluation_input_gradient(const SampleView& dy, const SampleView& dx, const double* c1,
                               Executor& executor);

/// The plain loops: every type and layout, the same bits as the vector kernels.
namespace reference {
void local_sums(const SampleView& u, const SampleView* v, std::int64_t* words, Executor& executor);
void normalize(const SampleView& x, const SampleView& y, const NormalizeConstants& constants,
               Executor& executor);
void input_gradient(const SampleView& dy, const SampleView& x, const SampleView& dx,
                    const GradientConstants& constants, Executor& executor);
void evaluation_input_gradient(const SampleView& dy, const SampleView& dx, const double* c1,
                               Executor& executor);
}  // namespace reference

}  // namespace syncbn::cpu
