#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/ptx_soak.sh VENV [SEED]
# What `make ptx` runs, for the PTX of three architectures, with random cases from SEED on (or from
# a fresh number), and planted defects in more orders of threads.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
export SYNCBN_SEED=${2:-$((RANDOM * 32768 + RANDOM))}
export SYNCBN_CASES=2000
echo "SYNCBN_SEED=$SYNCBN_SEED"
for architecture in 80 90 120; do
  "$venv/bin/cmake" --preset ptx -D SYNCBN_PTX_ARCHITECTURE="$architecture" >/dev/null
  "$venv/bin/cmake" --build --preset ptx
  tests=build/cpu/tests/ptx
  "$tests/syncbn_ptx_tests" --ptx="$tests/kernels" --kernels --gtest_brief=1
  "$tests/syncbn_ptx_tests" --ptx="$tests/kernels" --kernels --weak --gtest_brief=1
  "$venv/bin/ctest" --preset ptx -R "^ptx.lint$"
done
"$tests/syncbn_ptx_defects" --ptx="$tests/kernels" --seeds=20 fence barrier warp_barrier
