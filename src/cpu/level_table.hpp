// One level's table of kernels. Included inside a level file's unnamed namespace, last.

template <class T>
void sum_planes_of(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  task.v.data == nullptr ? sum_planes<T, false>(task, windows, w)
                         : sum_planes<T, true>(task, windows, w);
}
template <class T>
void sum_rows_of(const SumsTask& task, Windows& windows, const WindowArrays& w) {
  task.v.data == nullptr ? sum_rows<T, false>(task, windows, w)
                         : sum_rows<T, true>(task, windows, w);
}
template <class T, class Pass>
void map_planes_of(const ElementsTask& task) {
  task.stream ? map_planes<T, Pass, true>(task) : map_planes<T, Pass, false>(task);
}
template <class T, class Pass>
void map_rows_of(const ElementsTask& task) {
  task.stream ? map_rows<T, Pass, true>(task) : map_rows<T, Pass, false>(task);
}

void sum_planes_any(DType dtype, const SumsTask& task, Windows& windows, const WindowArrays& w) {
  dtype == DType::kFloat32   ? sum_planes_of<float>(task, windows, w)
  : dtype == DType::kFloat16 ? sum_planes_of<Half>(task, windows, w)
                             : sum_planes_of<BFloat16>(task, windows, w);
}
void sum_rows_any(DType dtype, const SumsTask& task, Windows& windows, const WindowArrays& w) {
  dtype == DType::kFloat32   ? sum_rows_of<float>(task, windows, w)
  : dtype == DType::kFloat16 ? sum_rows_of<Half>(task, windows, w)
                             : sum_rows_of<BFloat16>(task, windows, w);
}
template <class Pass>
void map_planes_any(DType dtype, const ElementsTask& task) {
  dtype == DType::kFloat32   ? map_planes_of<float, Pass>(task)
  : dtype == DType::kFloat16 ? map_planes_of<Half, Pass>(task)
                             : map_planes_of<BFloat16, Pass>(task);
}
template <class Pass>
void map_rows_any(DType dtype, const ElementsTask& task) {
  dtype == DType::kFloat32   ? map_rows_of<float, Pass>(task)
  : dtype == DType::kFloat16 ? map_rows_of<Half, Pass>(task)
                             : map_rows_of<BFloat16, Pass>(task);
}

constexpr Kernels kernels_named(const char* name) {
  return {name,
          sum_planes_any,
          sum_rows_any,
          map_planes_any<Normalize>,
          map_rows_any<Normalize>,
          map_planes_any<InputGradient>,
          map_rows_any<InputGradient>};
}
