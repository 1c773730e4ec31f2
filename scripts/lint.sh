#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/lint.sh {all|quick|tests|format}
# quick: formatting and ruff. all: also mypy and clang-tidy, which need `make build`. tests: clang-tidy
# over the C++ tests, which take longer than all else. format: repair instead.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-all}
tools=${VENV:-.venv}/bin
jobs=${JOBS:-$(nproc)}

sources() {  # NUL-separated, also files that are not added yet
  git ls-files -z --cached --others --exclude-standard --deduplicate -- "$@" |
    while IFS= read -r -d '' file; do
      if [[ -f $file ]]; then printf '%s\0' "$file"; fi
    done
}
all_cpp=('*.c' '*.cpp' '*.hpp' '*.h' '*.cu' '*.cuh')

if [[ $mode == format ]]; then
  "$tools/ruff" check --quiet --fix-only .
  "$tools/ruff" format --quiet .
  sources "${all_cpp[@]}" | xargs -0 -r "$tools/clang-format" -i
  exit
fi

failed=0
check() {
  echo "lint: $1"
  shift
  "$@" || failed=1
}
clang_format() { sources "${all_cpp[@]}" | xargs -0 -r "$tools/clang-format" --dry-run --Werror; }

clang_tidy() {  # tests or others
  fuzzers=()
  if [[ -e build/fuzz/compile_commands.json ]]; then fuzzers=(build/fuzz); fi  # after `make fuzz`
  "$tools/python" scripts/clang_tidy.py "$1" "$jobs" "$tools/clang-tidy" build/cpu build/wheel \
    "${fuzzers[@]}"
}

if [[ $mode == tests ]]; then
  check "clang-tidy" clang_tidy tests
  exit "$failed"
fi
check "ruff check" "$tools/ruff" check --quiet .
check "ruff format" "$tools/ruff" format --check --quiet .
check "clang-format" clang_format
if [[ $mode == all ]]; then
  (  # beside clang-tidy: each has times in which it uses one core
    check "mypy" "$tools/mypy" --no-error-summary
    # A user's program with the package as it is installed, without this project's configuration.
    check "mypy of a user's program" "$tools/mypy" --no-error-summary --config-file= \
      --python-version 3.10 --strict tests/typing
    exit "$failed"
  ) &
  check "clang-tidy" clang_tidy others
  wait "$!" || failed=1
fi
if ((failed)); then
  echo "lint: failed; 'make format' repairs formatting" >&2
fi
exit "$failed"
