#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/sanitize.sh VENV
# What CI runs of the sanitizers: C++ tests that come by most of the code with all three, PyTorch's
# operators with those of addresses and undefined behaviour, in the fuzzers' build, with clang. `make
# asan tsan` run all C++ tests.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
export SYNCBN_CASES=100  # of the property tests

"$venv/bin/cmake" --preset fuzz -D SYNCBN_TORCH=ON >/dev/null
"$venv/bin/cmake" --build --preset fuzz --target syncbn_short_tests syncbn_torch_cpu
few='-*ManyExchanges*'  # without those that only repeat
short_tests() { "build/$1/tests/cpp/syncbn_short_tests" --gtest_brief=1 --gtest_filter="$few"; }

# The package with these operators. The sanitizer comes before all other libraries, and looks for
# C++'s in those that came with it; Python leaks.
package=build/fuzz/package/syncbn
rm -rf "$package"
mkdir -p "$package/lib"
cp -r python/syncbn/. "$package"
ln -sf "$PWD/build/fuzz/bindings/torch/libsyncbn_torch_cpu.so" "$package/lib/"
cp build/fuzz/bindings/torch/_build.py "$package"
machine=$(uname -m)
preloaded="$(clang++ -print-file-name="libclang_rt.asan-$machine.so") $(clang++ -print-file-name=libstdc++.so)"
operator_tests() {
  LD_PRELOAD=$preloaded ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$PWD/build/fuzz/package \
    SYNCBN_EXAMPLES=60 OMP_NUM_THREADS=2 "$venv/bin/python" -m pytest --capture=sys -p no:cacheprovider \
    --hypothesis-seed=1 tests/python/bits/test_properties.py tests/python/step/test_in_place.py \
    tests/python/graph/test_{batch_norm_op,odd_tensors}.py \
    tests/python/exchange/test_shared_memory_ops.py
}
# They take one core, and the compiler has the other one.
{ short_tests fuzz && operator_tests; } &
addresses=$!

"$venv/bin/cmake" --preset tsan >/dev/null
"$venv/bin/cmake" --build --preset tsan --target syncbn_short_tests
short_tests tsan
wait $addresses
