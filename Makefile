# Everything on a fresh machine with Python 3.10+ and a C++17 compiler:
#   make demo    set up, build, and train a small MoE model with and without TopoEP
#   make test    set up, build, and run all tests
# Also: make example-transformers, make example-torchtitan, make example-megatron,
#       make test-frameworks, make test-slow, make fuzz, make lint, make bench, make bench-full,
#       make bench-adapters, make clean.

PYTHON ?= python3
VENV ?= .venv
# The extra environment of `make test-frameworks`: transformers, torchtitan and megatron-core.
FRAMEWORKS ?= .venv-frameworks
# The pinned torch: a CPU or a CUDA build, as the package index offers for this machine.
TORCH ?= torch==2.13.0

PIP := $(VENV)/bin/pip --disable-pip-version-check install --quiet
RUN := $(VENV)/bin/python
TOOLS := numpy setuptools wheel ninja cmake pytest hypothesis scipy rich matplotlib \
         ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5

# What a build depends on; Python files are used in place.
SOURCES := setup.py pyproject.toml tools/toolchain.py $(shell find csrc -type f)

.PHONY: demo test test-slow test-frameworks example-transformers example-torchtitan \
        example-megatron fuzz lint format bench bench-full bench-adapters clean
.DELETE_ON_ERROR:

$(VENV)/tools.stamp: Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) $(TOOLS)
	touch $@

# nvcc from its wheels, only where no toolkit is found: the tests compile the kernels.
$(VENV)/nvcc.stamp: $(VENV)/tools.stamp
	$(RUN) -c "import sys; sys.path.insert(0, 'tools'); import toolchain; \
	           sys.exit(toolchain.find_cuda_home() is None)" \
	  || $(PIP) 'nvidia-cuda-nvcc==13.0.88' 'nvidia-nvvm==13.0.88' 'nvidia-cuda-crt==13.0.88' \
	            'nvidia-cuda-runtime==13.0.96' 'nvidia-cuda-cccl==13.0.*' \
	  || echo "no nvcc for this machine: the compile gate will be skipped"
	touch $@

# NCCL's headers alone, only where torch brings none: the tests compile what uses them. The library
# goes away at once, since a second one in the process would be a trap.
NCCL_HOME := $(abspath $(VENV))/nccl/nvidia/nccl

$(VENV)/nccl.stamp: $(VENV)/tools.stamp
	$(RUN) -c "import sys; sys.path.insert(0, 'tools'); import toolchain; \
	           sys.exit(toolchain.find_nccl() is None)" \
	  || $(PIP) --no-deps --target $(VENV)/nccl nvidia-nccl-cu12==2.30.7 \
	  || echo "no NCCL headers for this machine: tests of transport nccl will be skipped"
	rm -rf $(NCCL_HOME)/lib
	touch $@

$(VENV)/build.stamp: $(VENV)/tools.stamp $(SOURCES)
	TOPOEP_WERROR=1 $(PIP) --no-build-isolation --no-deps -e .
	touch $@

demo: $(VENV)/build.stamp
	$(RUN) -m topoep.demo $(ARGS)

# What the tests find NCCL by: what is set, else the headers above, else what torch brings.
WITH_NCCL := TOPOEP_NCCL_HOME="$${TOPOEP_NCCL_HOME:-$$(ls -d $(NCCL_HOME) 2>/dev/null)}"

test: $(VENV)/build.stamp $(VENV)/nvcc.stamp $(VENV)/nccl.stamp
	$(VENV)/bin/cmake -S . -B build/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	    -DTOPOEP_SANITIZE=address,undefined >/dev/null
	$(VENV)/bin/cmake --build build/cmake >build/cmake.log || { cat build/cmake.log; exit 1; }
	$(VENV)/bin/ctest --test-dir build/cmake --output-on-failure
	$(WITH_NCCL) $(RUN) -m pytest --durations=15 -m "not slow and not gpu and not nccl"

test-slow: $(VENV)/build.stamp $(VENV)/nvcc.stamp $(VENV)/nccl.stamp
	$(WITH_NCCL) TOPOEP_TEST_EXAMPLES=20 $(RUN) -m pytest --durations=15 -m "not gpu and not nccl"

# The library that `build.stamp` leaves in topoep/ loads into the other environment's torch too.
$(FRAMEWORKS)/frameworks.stamp: $(wildcard tools/frameworks/*)
	sh tools/frameworks/setup.sh $(FRAMEWORKS) $(PYTHON)
	touch $@

RUN_FRAMEWORKS := PYTHONPATH=. $(FRAMEWORKS)/bin/python

test-frameworks: $(VENV)/build.stamp $(FRAMEWORKS)/frameworks.stamp
	TOPOEP_TEST_FRAMEWORKS=1 $(RUN_FRAMEWORKS) -m pytest --durations=15 tests/frameworks

example-transformers: $(VENV)/build.stamp $(FRAMEWORKS)/frameworks.stamp
	$(RUN_FRAMEWORKS) examples/frameworks/train_transformers.py

example-torchtitan: $(VENV)/build.stamp $(FRAMEWORKS)/frameworks.stamp
	$(RUN_FRAMEWORKS) examples/frameworks/train_torchtitan.py

example-megatron: $(VENV)/build.stamp $(FRAMEWORKS)/frameworks.stamp
	$(RUN_FRAMEWORKS) examples/frameworks/train_megatron.py

bench-adapters: $(VENV)/build.stamp $(FRAMEWORKS)/frameworks.stamp
	$(RUN_FRAMEWORKS) benchmarks/bench_adapters.py

# Seeds are printed; FIRST=.. continues where the last run ended.
FIRST ?= 1
fuzz: $(VENV)/build.stamp
	$(RUN) -m tests.fuzz_plans --first $(FIRST) --plans 100000 --kernels 2000
	$(RUN) -m tests.distributed.fuzz_experts --first $(FIRST) --number 300

CXX_FILES := $(shell git ls-files '*.h' '*.cpp' '*.cuh' '*.cu')

lint: $(VENV)/tools.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(RUN) tools/check_layering.py

format: $(VENV)/tools.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

# What each script measures, and what is not part of these two, is in benchmarks/README.md.
bench: $(VENV)/build.stamp
	$(RUN) benchmarks/run.py

bench-full: $(VENV)/build.stamp $(VENV)/nvcc.stamp $(VENV)/nccl.stamp
	$(WITH_NCCL) $(RUN) benchmarks/run.py --full

clean:
	rm -rf build topoep/_ops*.so
