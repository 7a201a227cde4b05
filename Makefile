# Every target makes the environment it needs. PYTHON, TORCH and VENV can be given: make test TORCH=torch==2.14.0 VENV=.venv-2.14
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
RUN := $(VENV)/bin
CAMPAIGN := PYTHONPATH=tests:benchmarks $(RUN)/python -m campaigns
BENCH_VENV ?= .venv-bench
BENCH := $(BENCH_VENV)/bin
NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)
CPP := tests/native/cpp
FAKES := $(wildcard tests/support/fakedev/*.cpp tests/support/fakedev/*.h $(CPP)/*.cpp $(CPP)/*.h tests/npu/*.cpp)
SOURCES := python tests benchmarks examples setup.py
FAULTS ?= 300
SEED ?= 0
CHAOS_SECONDS ?= inf
FUZZ_SECONDS ?= 600
WORKERS ?= 1
RUNS ?= 100
LINKS ?=

# The oldest and the newest torch that epload supports (setup.py).
OLDEST ?= torch==2.11.0
NEWEST ?= torch==2.15.0
TORCH_NPU ?= torch-npu==2.13.0

.PHONY: help build test test-smoke test-oldest test-newest test-npu lint format demo chaos census fuzz replaced sanitize bench bench-quick bench-net bench-net-quick simulate gpu-check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

$(VENV)/ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --upgrade pip
	$(RUN)/pip install --quiet "$(TORCH)"
	$(RUN)/pip install --quiet -r requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/ready $(NATIVE) CMakeLists.txt setup.py pyproject.toml
	$(RUN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

build: $(VENV)/built ## the environment, and epload built into it

test: build ## the whole test suite
	$(RUN)/python -m pytest

# Not an editable install, which would replace the libraries in python/epload that another torch uses.
test-smoke: $(VENV)/ready ## the tests of tests/smoke.txt with TORCH, in VENV; without CUDA kernels
	EPLOAD_CUDA=0 PATH="$(abspath $(RUN)):$$PATH" \
	  $(RUN)/pip install --quiet --force-reinstall --no-build-isolation --no-deps .
	$(RUN)/python -m pytest @tests/smoke.txt

test-oldest: ## test-smoke with the oldest torch that is supported, in an environment of its own
	$(MAKE) test-smoke TORCH="$(OLDEST)" VENV=$(VENV)-oldest

test-newest: ## test-smoke with the newest
	$(MAKE) test-smoke TORCH="$(NEWEST)" VENV=$(VENV)-newest

$(VENV)-npu/ready:
	$(PYTHON) -m venv $(VENV)-npu
	$(VENV)-npu/bin/pip install --quiet --upgrade pip
	$(VENV)-npu/bin/pip install --quiet "$(TORCH)" numpy pyyaml pytest tqdm "setuptools>=77" "cmake>=3.22" "pybind11>=2.13" ninja wheel
	$(VENV)-npu/bin/pip install --quiet --no-deps "$(TORCH_NPU)"
	touch $@

test-npu: $(VENV)-npu/ready ## the Ascend part with the real torch_npu over a fake CANN, in an environment of its own
	EPLOAD_NPU=1 EPLOAD_CUDA=0 PATH="$(abspath $(VENV)-npu/bin):$$PATH" \
	  $(VENV)-npu/bin/pip install --quiet --force-reinstall --no-build-isolation --no-deps .
	cd tests/npu && $(abspath $(VENV)-npu/bin/python) -m pytest --confcutdir . --override-ini testpaths=. --override-ini pythonpath=.

lint: $(VENV)/ready ## ruff, mypy (strict, on python/), the order of the packages, and clang-format
	$(RUN)/ruff check $(SOURCES)
	$(RUN)/ruff format --check $(SOURCES)
	$(RUN)/mypy
	PYTHONPATH=python $(RUN)/lint-imports --no-cache
	$(RUN)/clang-format --dry-run --Werror $(NATIVE) $(FAKES)

format: $(VENV)/ready ## rewrite the sources as lint wants them
	$(RUN)/ruff check --fix $(SOURCES)
	$(RUN)/ruff format $(SOURCES)
	$(RUN)/clang-format -i $(NATIVE) $(FAKES)

demo: build ## load a Mixture-of-Experts checkpoint over two emulated nodes
	$(RUN)/python examples/demo.py

chaos: build ## FAULTS=300 seeded faults from SEED=0 on, on 4 ranks, each judged; LINKS=1: over shaped links, as root
	$(CAMPAIGN).chaos --faults $(FAULTS) --seed $(SEED) --seconds $(CHAOS_SECONDS) $(if $(LINKS),--links)

census: build ## every class of the installed transformers that builds from a shrunken config, loaded and judged; WORKERS=1
	$(CAMPAIGN).census --workers $(WORKERS)

fuzz: build ## hostile input for FUZZ_SECONDS=600: hypothesis, and AFL++ where it is installed
	$(CAMPAIGN).fuzz --seconds $(FUZZ_SECONDS)

replaced: build ## RUNS=100 loads from SEED=0 on whose checkpoint is replaced meanwhile: each right, or refused on every rank
	$(CAMPAIGN).replaced --runs $(RUNS) --seed $(SEED)

sanitize: build ## the native code under AddressSanitizer with UBSan, and under ThreadSanitizer
	$(CPP)/build.sh $(RUN)/python build/native/address test_native.cpp -fsanitize=address,undefined -fno-sanitize-recover=all
	build/native/address $(CPP)/corpus
	$(CPP)/build.sh $(RUN)/python build/native/thread test_native.cpp -fsanitize=thread
	TSAN_OPTIONS=halt_on_error=1 build/native/thread $(CPP)/corpus

$(BENCH_VENV)/built: benchmarks/requirements.txt $(NATIVE) CMakeLists.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH)/pip install --quiet --upgrade pip
	$(BENCH)/pip install --quiet "$(TORCH)"
	$(BENCH)/pip install --quiet -r benchmarks/requirements.txt
	$(BENCH)/pip install --quiet -e .
	touch $@

bench: $(BENCH_VENV)/built ## every loader, over loopback; tables and plots into docs/
	$(BENCH)/python benchmarks/bench_load.py --docs
	$(BENCH)/python benchmarks/bench_few.py --docs

bench-quick: $(BENCH_VENV)/built ## the same on a twelfth of the tensors, into benchmarks/results/; under 10 minutes
	$(BENCH)/python benchmarks/bench_load.py --quick

bench-net: $(BENCH_VENV)/built ## over shaped links, as root; then the simulator; tables and plots into docs/
	$(BENCH)/python benchmarks/bench_net.py --docs
	$(BENCH)/python benchmarks/simulate.py --docs

bench-net-quick: $(BENCH_VENV)/built ## the same with 2 and 4 nodes and 80 MB, as root, into benchmarks/results/
	$(BENCH)/python benchmarks/bench_net.py --quick

simulate: $(BENCH_VENV)/built ## the simulator alone, from the numbers in docs/; seconds
	$(BENCH)/python benchmarks/simulate.py --docs

gpu-check: ## on a machine with an NVIDIA GPU: build, test, sanitize, trace and measure with PYTHON's own torch
	$(PYTHON) benchmarks/gpu_check.py

clean: ## remove builds and the environment
	rm -rf build dist $(VENV) $(VENV)-npu $(VENV)-oldest $(VENV)-newest $(BENCH_VENV) python/epload/*.so python/*.egg-info
