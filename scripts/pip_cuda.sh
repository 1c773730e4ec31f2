#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: make wheel $(scripts/pip_cuda.sh VENV)
# Where there is no CUDA toolkit: installs requirements/cuda.txt into VENV and prints CUDA_HOME=folder.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh "$1" cuda >&2
home=$("$1/bin/python" -c 'from importlib.util import find_spec
print(next(iter(find_spec("nvidia.cu13").submodule_search_locations)))')
# CMake and nvcc look for the names that a toolkit has.
ln -sfn lib "$home/lib64"
ln -sfn libcudart.so.13 "$home/lib/libcudart.so"
echo "CUDA_HOME=$home"
