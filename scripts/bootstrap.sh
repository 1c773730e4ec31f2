#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/bootstrap.sh VENV GROUP...
# Makes the virtual environment VENV where there is none and installs requirements/GROUP.txt.
# Environment: PYTHON (interpreter), CXX (compiler), TORCH (another version of PyTorch).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "syncbn: $*" >&2
  exit 1
}

find_python() {
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10) candidate
  if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.10 or newer was not found (tried ${candidates[*]}): install it or set PYTHON"
}

check_compiler() {
  local candidates=(c++ g++ clang++) candidate  # in CMake's order
  if [[ -n "${CXX:-}" ]]; then
    candidates=("$CXX")
  fi
  for candidate in "${candidates[@]}"; do
    if command -v "${candidate%% *}" >/dev/null; then
      # shellcheck disable=SC2086 # CXX may hold options
      if printf '#include <bit>\n#include <concepts>\n#include <barrier>\n#include <span>\n' |
        $candidate -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
        return
      fi
      fail "the compiler $candidate does not support C++20: install g++ 12 or clang 14 or newer," \
        "or set CXX"
    fi
  done
  fail "no C++ compiler was found (tried ${candidates[*]}): install g++ 12 or newer, or set CXX"
}

venv=$1
shift
PATH=${PATH//"$PWD/$venv/bin:"/}  # a broken environment is not what makes the next one
check_compiler

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  echo "syncbn: new virtual environment in $venv ($("$python" --version))"
  "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
    fail "$python cannot make a virtual environment: install its venv module" \
      "(Debian and Ubuntu: python3-venv)"
fi

for group in "$@"; do
  echo "syncbn: installing requirements/$group.txt into $venv"
  # A release of torchvision fits one of PyTorch: pip knows which. Python compiles what it imports;
  # all of PyTorch takes 20 s.
  sed "${TORCH:+s/^torch==.*/torch==$TORCH/; s/^torchvision==.*/torchvision\\ntorch==$TORCH/}" \
    "requirements/$group.txt" |
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r /dev/stdin ||
    fail "pip could not install requirements/$group.txt (see above)"
done
