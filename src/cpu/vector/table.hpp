// SPDX-License-Identifier: Apache-2.0
// One level's table of kernels. Included inside a level file's unnamed namespace, last.

template <class T>
void sum_planes_of(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  task.mask != nullptr        ? sum_planes<T, SumsOf::kMasked>(task, windows, w)
  : task.constants != nullptr ? sum_planes<T, SumsOf::kActivated>(task, windows, w)
  : task.v.data != nullptr    ? sum_planes<T, SumsOf::kProduct>(task, windows, w)
                              : sum_planes<T, SumsOf::kSquare>(task, windows, w);
}
template <class T>
void sum_rows_of(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  task.constants != nullptr ? sum_rows<T, SumsOf::kActivated>(task, windows, w)
  : task.v.data != nullptr  ? sum_rows<T, SumsOf::kProduct>(task, windows, w)
                            : sum_rows<T, SumsOf::kSquare>(task, windows, w);
}
template <class T, class Pass>
void map_planes_of(const ElementsTask& task) {
  task.stream ? map_planes<T, Pass, true>(task) : map_planes<T, Pass, false>(task);
}
template <class T, class Pass>
void map_rows_of(const ElementsTask& task) {
  task.stream&& rows_aligned<T>(task.out) ? map_rows<T, Pass, true>(task)
                                          : map_rows<T, Pass, false>(task);
}

/// Calls body(T()). Where an instruction rounds to bfloat16, a level has passes of bfloat16 alone:
/// kPass of the other dtypes is AVX-512's.
template <auto kPass, class Body, class... Arguments>
void dispatch_level(DType dtype, const Body& body, Arguments&... arguments) {
  dispatch_vectorized(dtype, [&](auto type) {
    if constexpr (kRoundsBFloat16 && !std::is_same_v<decltype(type), BFloat16>) {
      (kAvx512Kernels->*kPass)(dtype, arguments...);
    } else {
      body(type);
    }
  });
}
void place_windows_any(DType dtype, const SumsTask& task, const WindowArrays& w) {
  dispatch_level<&Kernels::place_windows>(
      dtype, [&](auto type) { place_windows<decltype(type)>(task, w); }, task, w);
}
void sum_planes_any(DType dtype, const SumsTask& task, Windows& windows, const WindowArrays& w) {
  dispatch_level<&Kernels::sum_planes>(
      dtype, [&](auto type) { sum_planes_of<decltype(type)>(task, windows, w); }, task, windows, w);
}
void sum_rows_any(DType dtype, const SumsTask& task, Windows& windows, const WindowArrays& w) {
  dispatch_level<&Kernels::sum_rows>(
      dtype, [&](auto type) { sum_rows_of<decltype(type)>(task, windows, w); }, task, windows, w);
}

using MapTask = void (*)(const ElementsTask&);

/// What kernel() gives for the pass of that name.
template <class Kernel>
MapTask with_pass(ElementPass pass, const Kernel& kernel) {
  switch (pass) {
    case ElementPass::kNormalize:
      return kernel(Normalize());
    case ElementPass::kNormalizeActivated:
      return kernel(NormalizeActivated<false>());
    case ElementPass::kNormalizeResidual:
      return kernel(NormalizeActivated<true>());
    case ElementPass::kGradient:
      return kernel(InputGradient());
    case ElementPass::kGradientActivated:
      return kernel(InputGradientActivated());
    case ElementPass::kGradientActivationMask:
      return kernel(InputGradientActivationMask());
    case ElementPass::kRecover:
      break;
  }
  return kernel(Recover());
}
void map_planes_any(DType dtype, ElementPass pass, const ElementsTask& task) {
  const auto map = [&](auto type) {
    with_pass(pass, [](auto of) { return map_planes_of<decltype(type), decltype(of)>; })(task);
  };
  dispatch_level<&Kernels::map_planes>(dtype, map, pass, task);
}
void map_rows_any(DType dtype, ElementPass pass, const ElementsTask& task) {
  const auto map = [&](auto type) {
    with_pass(pass, [](auto of) { return map_rows_of<decltype(type), decltype(of)>; })(task);
  };
  dispatch_level<&Kernels::map_rows>(dtype, map, pass, task);
}

constexpr Kernels kernels_named(const char* name) {
  return {name,           place_windows_any, sum_planes_any, sum_rows_any,
          map_planes_any, map_rows_any,      round_moments,  round_sums,
          coefficients,   update_running,    pack_affine,    pack_gradient};
}
