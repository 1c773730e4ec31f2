#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/test.sh VENV {cpp|python}...
# Runs the tests that are already built, all of them even after a failure, and closes with counts.
# Environment: ARGS (more arguments for pytest), JOBS (cores; some more tests run at a time, because
# ranks and time limits wait: of pytest at most 4).
set -uo pipefail
cd "$(dirname "$0")/.."

venv=$1
shift
jobs=${JOBS:-$(nproc)}
results=build/test-results
rm -rf "$results"
mkdir -p "$results"

for suite in "$@"; do
  case $suite in
    cpp)
      "$venv/bin/ctest" --preset cpu --parallel $((jobs + 1)) \
        --output-junit "$PWD/$results/cpp.xml"
      ;;
    python)
      # A file's tests share fixtures. Threads of one worker that wait do not take another's core.
      # shellcheck disable=SC2086 # several arguments
      OMP_WAIT_POLICY=passive "$venv/bin/python" -m pytest --numprocesses $((jobs < 2 ? 3 : 4)) \
        --dist loadfile --no-loadscope-reorder --durations 15 --junitxml="$results/python.xml" ${ARGS:-}
      ;;
  esac || failed=1
done
"$venv/bin/python" scripts/summary.py "$results" "$@" || failed=1
exit "${failed:-0}"
