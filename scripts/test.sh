#!/usr/bin/env bash
# Usage: scripts/test.sh VENV {cpp|python}...
# Runs the tests that are already built, all of them even after a failure, and closes with counts.
# Environment: ARGS (more arguments for pytest), JOBS (tests of ctest at a time).
set -uo pipefail
cd "$(dirname "$0")/.."

venv=$1
shift
results=build/test-results
rm -rf "$results"
mkdir -p "$results"

for suite in "$@"; do
  case $suite in
    cpp)
      "$venv/bin/ctest" --preset cpu --parallel "${JOBS:-$(nproc)}" \
        --output-junit "$PWD/$results/cpp.xml"
      ;;
    python)
      # shellcheck disable=SC2086 # several arguments
      "$venv/bin/python" -m pytest --junitxml="$results/python.xml" ${ARGS:-}
      ;;
  esac || failed=1
done
"$venv/bin/python" scripts/summary.py "$results" "$@" || failed=1
exit "${failed:-0}"
