# The commands that people type; what takes more than a few lines is in scripts/.
# Variables: TORCH=2.12.0 (another PyTorch, in an environment of its own), PYTHON, CXX, JOBS,
# ARGS (for pytest or the demo), SYNCBN_WERROR=ON (as CI does).
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
SHELL := bash

export JOBS ?= $(shell nproc)
export TORCH
export SYNCBN_WERROR ?= OFF
export VENV := .venv$(if $(TORCH),-torch-$(TORCH))
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

python := $(VENV)/bin/python
cmake := $(VENV)/bin/cmake
package := $(VENV)/.stamp-package
# The demo has tests, too. Versions in interop.txt are those for the PyTorch in build.txt.
test_tools := $(VENV)/.stamp-test $(VENV)/.stamp-demo $(if $(TORCH),,$(VENV)/.stamp-interop)
package_sources := $(shell find CMakeLists.txt pyproject.toml README.md cmake include src bindings \
                     python -not -path '*/__pycache__*' 2>/dev/null)

help:  ## list these targets
	@awk -F ':.*## *' '/^[a-z -]+:.*## / {printf "  %-24s %s\n", $$1, $$2}' Makefile

setup: $(foreach group,build test demo interop lint,$(VENV)/.stamp-$(group))  ## all tools, in .venv

build: build-cpp $(package)  ## library, C++ tests, examples, and the Python package in .venv

test: build-cpp $(package) $(test_tools)  ## C++ and Python tests, closing with their counts
	@scripts/test.sh $(VENV) cpp python

test-cpp: build-cpp  ## C++ tests only
	@scripts/test.sh $(VENV) cpp

test-python: $(package) $(test_tools)  ## Python tests only, for example ARGS="-k convert"
	@scripts/test.sh $(VENV) python

demo: $(package) $(VENV)/.stamp-demo  ## train the example network, for example ARGS=--quick
	$(python) examples/segmentation/main.py $(ARGS)

bench: $(package)  ## one layer against PyTorch's batch norm and a copy; ARGS="--threads 1"
	$(python) benchmarks/bench_layer.py $(ARGS)

gpu-check:  ## on a machine with a GPU, without a network: build, test, sanitize, measure
	$(or $(PYTHON),python3) scripts/gpu_check.py $(ARGS)

asan tsan release cuda: $(VENV)/.stamp-build  ## C++ tests with this preset
	$(cmake) --workflow --preset $@

cuda-kernels: $(VENV)/.stamp-build  ## the library with CUDA kernels for all architectures; needs nvcc
	$(cmake) --preset cuda
	$(cmake) --build --preset cuda --target syncbn

lint: build $(VENV)/.stamp-lint  ## check format and style
	@scripts/lint.sh all

format: $(VENV)/.stamp-build $(VENV)/.stamp-lint  ## repair format and style
	@scripts/lint.sh format

wheel: $(VENV)/.stamp-build  ## a wheel in dist/
	$(python) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove everything but the environments
	rm -rf build dist demo-output .venv*/.stamp-package

build-cpp: $(VENV)/.stamp-build
	$(cmake) --preset cpu
	$(cmake) --build --preset cpu

# Set-up is done again when a requirement changes; it is quick where all is installed already.
$(VENV)/.stamp-%: requirements/%.txt scripts/bootstrap.sh
	@scripts/bootstrap.sh $(VENV) $*
	@touch $@
$(VENV)/.stamp-test $(VENV)/.stamp-demo $(VENV)/.stamp-interop $(VENV)/.stamp-lint: \
  $(VENV)/.stamp-build

$(package): $(VENV)/.stamp-build $(package_sources)
	$(python) -m pip install --quiet --no-build-isolation --no-deps .
	@touch $@

.PHONY: help setup build build-cpp test test-cpp test-python demo bench gpu-check asan tsan \
  release cuda cuda-kernels lint format wheel clean
