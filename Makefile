# The commands that people type; what takes more than a few lines is in scripts/.
# Variables: TORCH=2.15.0 (another PyTorch, in an environment of its own), PYTHON, CXX, JOBS,
# ARGS (for pytest or the demo), MINUTES (soak), SECONDS (fuzz), SEED (both), SYNCBN_WERROR=ON (as CI
# does), SYNCBN_CUDA=ON (with CUDA kernels, also without a GPU; OFF: without them), MANYLINUX=2_28 (the
# newest system that a wheel may need),
# SYNCBN_REPOSITORY=https://HOST/OWNER/NAME@TAG (where the links of the package index's page lead),
# LINKED=1 (release-check: with the PyTorch of .venv, in place of a download for each environment).
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
SHELL := bash

export JOBS ?= $(shell nproc)
export TORCH
export SYNCBN_WERROR ?= OFF
export SYNCBN_CUDA ?= AUTO
export VENV := .venv$(if $(TORCH),-torch-$(TORCH))
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

python := $(VENV)/bin/python
cmake := $(VENV)/bin/cmake
package := $(VENV)/.stamp-package
built_wheel := build/wheel-file$(if $(TORCH),-torch-$(TORCH))
# The demo has tests, too, and the package for JAX.
jax_package := $(VENV)/.stamp-package-jax
test_tools := $(VENV)/.stamp-test $(VENV)/.stamp-demo $(VENV)/.stamp-interop $(jax_package)
# The site needs nothing of what the package needs.
docs_venv := .venv-docs
docs_tools := $(docs_venv)/.stamp-docs
package_sources := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE *NOTICE* cmake include \
                     scripts/index_page.py src bindings python -not -path '*/__pycache__*' -not -path 'bindings/jax/*' 2>/dev/null)

help:  ## list these targets
	@awk -F ':.*## *' '/^[a-z0-9 -]+:.*## / {printf "  %-24s %s\n", $$1, $$2}' Makefile

setup: $(foreach group,build test demo interop bench lint,$(VENV)/.stamp-$(group))  ## all tools, in .venv

build: build-cpp $(package)  ## library, C++ tests, examples, and the Python package in .venv

test: build-cpp $(package) $(test_tools)  ## C++ and Python tests, closing with their counts
	@scripts/test.sh $(VENV) cpp python

test-cpp: build-cpp  ## C++ tests only
	@scripts/test.sh $(VENV) cpp

check-cpp:  ## try a C++ change: the core and its tests, with cmake alone, without PyTorch
	cmake --workflow --preset check

test-python: $(package) $(test_tools)  ## Python tests only, for example ARGS="-k convert"
	@scripts/test.sh $(VENV) python

interop: $(package) $(test_tools) $(VENV)/.stamp-frameworks  ## other people's code, all of it
	SYNCBN_INTEROP=all OMP_WAIT_POLICY=passive $(python) -m pytest --durations 15 $(ARGS) \
	  $(addprefix tests/python/interop/test_,pytorchs_tests.py class_checks.py \
	    class_checks_frameworks.py ray.py trainers.py training_loops.py)

curves: $(package) $(test_tools) $(VENV)/.stamp-frameworks  ## learning curves of other people's training loops, into build/
	@mkdir -p build
	OMP_WAIT_POLICY=passive $(python) tests/python/interop/curves.py build/training_loops.png

demo: $(package) $(VENV)/.stamp-demo  ## train the example network, for example ARGS=--quick
	$(python) examples/segmentation/main.py $(ARGS)

demo-clipart: $(package) $(VENV)/.stamp-demo  ## the demo on drawings of Debian's package openclipart-png
	$(python) examples/segmentation/clipart.py build/clipart
	$(python) examples/segmentation/main.py --data build/clipart --size 64 $(ARGS)

bench: $(package) $(jax_package) bench-cpp $(VENV)/.stamp-bench  ## all CPU benchmarks, 7 minutes; ARGS=--quick, or --write for docs/
	$(python) benchmarks/suite.py $(ARGS)

bench-count: bench-cpp  ## instructions of each pass against stored counts; ARGS=--update stores
	$(or $(PYTHON),python3) benchmarks/count.py build/bench/benchmarks/count_passes $(ARGS)

gpu-check:  ## on a machine with a GPU, without a network: build, test, sanitize, measure
	$(or $(PYTHON),python3) scripts/gpu_check.py $(ARGS)

googletest:  ## its sources into build/googletest, which gpu-check needs where there is no package
	$(or $(PYTHON),python3) scripts/googletest.py $(ARGS)

aarch64: $(VENV)/.stamp-build googletest  ## cross-compile, and run the C++ tests of vector code under qemu-user
	$(cmake) --preset $@
	$(cmake) --build --preset $@
	$(VENV)/bin/ctest --preset $@ -j 2

asan tsan release cuda: $(VENV)/.stamp-build  ## C++ tests with this preset
	$(cmake) --workflow --preset $@

ptx: $(VENV)/.stamp-build  ## look over the kernels' PTX and machine code, needs nvcc, ARCHITECTURE=90
	$(cmake) --preset ptx -D SYNCBN_PTX_ARCHITECTURE=$(or $(ARCHITECTURE),90)
	$(cmake) --build --preset ptx
	$(VENV)/bin/ctest --preset ptx

sanitize: $(test_tools)  ## what CI runs of the sanitizers: C++ tests, PyTorch's operators
	@scripts/sanitize.sh $(VENV)

soak: build-cpp $(package) $(test_tools)  ## property tests with fresh seeds, MINUTES=30 SEED=
	$(python) scripts/soak.py $(or $(MINUTES),30) $(SEED)

fuzz: $(VENV)/.stamp-build  ## fuzzers, with clang, SECONDS=60 SEED=
	$(cmake) --preset fuzz
	$(cmake) --build --preset fuzz
	$(python) scripts/fuzz.py $(or $(SECONDS),60) $(SEED)

model:  ## the protocol in shared memory in all its executions, with spin
	$(or $(PYTHON),python3) tests/model/check.py

weekly:  ## what takes too long for each change; .github/workflows/weekly.yml runs it side by side
	$(MAKE) asan tsan
	$(MAKE) soak MINUTES=60
	$(MAKE) fuzz SECONDS=900
	$(MAKE) lint-tests
	$(MAKE) test-python ARGS="-m weekly"
	$(MAKE) interop
	$(MAKE) wheel SYNCBN_CUDA=ON SYNCBN_WERROR=ON  # kernels of all architectures, without spills

lint: build $(VENV)/.stamp-lint  ## check format and style
	@scripts/lint.sh all

lint-tests: build-cpp $(VENV)/.stamp-lint  ## clang-tidy over the C++ tests, which `make lint` leaves out
	@scripts/lint.sh tests

format: $(VENV)/.stamp-build $(VENV)/.stamp-lint  ## repair format and style
	@scripts/lint.sh format

docs: $(docs_tools)  ## the documentation site, in build/site; a few seconds after the first time
	NO_MKDOCS_2_WARNING=1 $(docs_venv)/bin/mkdocs --quiet build
	@echo "build/site/index.html; with a search: python3 -m http.server --directory build/site"

wheel: $(package)  ## a wheel in dist/, inspected and tried; with CUDA where nvcc fits PyTorch
	rm -f dist/syncbn-*.whl
	install -D --target-directory=dist --mode=644 $(built_wheel)/*.whl
	$(python) scripts/check_wheel.py --retag $(if $(MANYLINUX),--at-most $(MANYLINUX)) dist/syncbn-*.whl
	$(python) scripts/smoke_wheel.py dist/syncbn-*.whl

wheel-old: $(VENV)/.stamp-build  ## on Debian 12: a wheel in dist/ for systems from glibc 2.28 on, inspected and tried
	scripts/sysroot.sh build/sysroot
	rm -rf build/wheel-old dist/syncbn-*x86_64.whl
	$(python) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel-old \
	  --config-settings=build-dir=build/cmake-old \
	  --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=cmake/sysroot.cmake .
	$(python) scripts/check_wheel.py --retag --at-most 2_28 build/wheel-old/*.whl
	install -D --target-directory=dist --mode=644 build/wheel-old/*.whl
	$(python) scripts/smoke_wheel.py dist/syncbn-*x86_64.whl

# The headers and the library are those of PyTorch for aarch64, which nothing runs here.
wheel-aarch64: $(VENV)/.stamp-build  ## cross-compile a wheel for aarch64 into dist/, CPU only, and inspect it
	rm -rf build/wheel-aarch64 dist/syncbn-*aarch64.whl
	$(python) -m pip install --quiet --no-deps --upgrade --target build/torch-aarch64 --only-binary :all: \
	  --platform manylinux_2_28_aarch64 $$(grep '^torch==' requirements/build.txt)
	SYNCBN_CUDA=OFF $(python) -m pip wheel --quiet --no-build-isolation --no-deps \
	  --wheel-dir build/wheel-aarch64 --config-settings=build-dir=build/cmake-aarch64 \
	  --config-settings=cmake.define.SYNCBN_MPI=OFF \
	  --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake \
	  --config-settings=cmake.define.SYNCBN_TORCH_DIR=$(CURDIR)/build/torch-aarch64/torch .
	$(python) scripts/check_wheel.py --retag build/wheel-aarch64/*.whl
	install -D --target-directory=dist --mode=644 build/wheel-aarch64/*.whl

sdist: $(VENV)/.stamp-build  ## a source distribution in dist/, and a wheel made of it, inspected and tried
	rm -rf dist/syncbn-*.tar.gz build/sdist
	$(python) -m build --no-isolation --sdist --outdir dist .
	$(python) -m pip wheel --quiet --no-deps --wheel-dir build/sdist dist/syncbn-*.tar.gz
	$(python) scripts/check_wheel.py --retag build/sdist/*.whl
	$(python) scripts/smoke_wheel.py build/sdist/*.whl

release-check: $(VENV)/.stamp-test  ## what a tag would publish: built, compared, installed alone and tried; with CUDA: SYNCBN_CUDA=ON
	$(python) -m pytest tests/rules/test_citation.py tests/rules/test_index_page.py
	rm -f $(package) && $(MAKE) sdist wheel  # the page and the addresses are this call's
	$(python) scripts/release_check.py $(if $(LINKED),--linked) dist/syncbn-*.tar.gz build/sdist/*.whl dist/syncbn-*.whl

clean:  ## remove everything but the environments
	rm -rf build dist demo-output .venv*/.stamp-package

build-cpp: $(VENV)/.stamp-build
	$(cmake) --preset cpu -D SYNCBN_TORCH=ON
	$(cmake) --build --preset cpu

bench-cpp: $(VENV)/.stamp-build
	$(cmake) --preset bench
	$(cmake) --build --preset bench

# Set-up is done again when a requirement changes; it is quick where all is installed already.
$(VENV)/.stamp-%: requirements/%.txt scripts/bootstrap.sh
	@scripts/bootstrap.sh $(VENV) $*
	@touch $@
$(VENV)/.stamp-test $(VENV)/.stamp-demo $(VENV)/.stamp-interop $(VENV)/.stamp-lint \
  $(VENV)/.stamp-bench $(VENV)/.stamp-frameworks $(VENV)/.stamp-jax: \
  $(VENV)/.stamp-build

$(docs_tools): requirements/docs.txt scripts/bootstrap.sh
	@scripts/bootstrap.sh $(docs_venv) docs
	@touch $@

$(package): $(VENV)/.stamp-build $(package_sources)
	rm -rf $(built_wheel)
	$(python) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(built_wheel) .
	$(python) -m pip install --quiet --no-deps --force-reinstall $(built_wheel)/*.whl
	@touch $@

# With the library of the Python package, which saves compiling the core again. (-C is unknown to
# Debian 12's pip.)
$(jax_package): $(package) $(VENV)/.stamp-jax $(shell find bindings/jax -type f -not -path '*/__pycache__*')
	$(python) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=cmake.define.syncbn_DIR=$$($(python) -m syncbn --cmake-dir) ./bindings/jax
	@touch $@

.PHONY: help setup build build-cpp test test-cpp check-cpp test-python demo demo-clipart bench bench-count bench-cpp \
  gpu-check googletest aarch64 asan tsan release cuda ptx sanitize soak fuzz interop curves model weekly lint \
  lint-tests format docs wheel wheel-old wheel-aarch64 sdist release-check clean
