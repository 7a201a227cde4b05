# Every target makes the environment it needs. PYTHON, TORCH and VENV can be given: make test TORCH=torch==2.14.0 VENV=.venv-2.14
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
RUN := $(VENV)/bin
NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)
FAKES := $(wildcard tests/fakedev/*.cpp tests/fakedev/*.h tests/native/*.cpp tests/native/*.h)
FAULTS ?= 300
SEED ?= 0
CHAOS_SECONDS ?= inf
FUZZ_SECONDS ?= 600
SOURCES := python tests benchmarks examples setup.py

.PHONY: help build test lint format demo chaos fuzz sanitize bench-load gpu-check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

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

lint: $(VENV)/ready ## ruff, mypy (strict, on python/) and clang-format
	$(RUN)/ruff check $(SOURCES)
	$(RUN)/ruff format --check $(SOURCES)
	$(RUN)/mypy
	$(RUN)/clang-format --dry-run --Werror $(NATIVE) $(FAKES)

format: $(VENV)/ready ## rewrite the sources as lint wants them
	$(RUN)/ruff check --fix $(SOURCES)
	$(RUN)/ruff format $(SOURCES)
	$(RUN)/clang-format -i $(NATIVE) $(FAKES)

demo: build ## load a Mixture-of-Experts checkpoint over two emulated nodes
	$(RUN)/python examples/demo.py

chaos: build ## FAULTS=300 seeded faults from SEED=0 on, on 4 ranks, each judged
	$(RUN)/python tests/chaos --faults $(FAULTS) --seed $(SEED) --seconds $(CHAOS_SECONDS)

fuzz: build ## hostile input for FUZZ_SECONDS=600: hypothesis, and AFL++ where it is installed
	$(RUN)/python tests/fuzz.py --seconds $(FUZZ_SECONDS)

sanitize: build ## the native code under AddressSanitizer with UBSan, and under ThreadSanitizer
	tests/native/build.sh $(RUN)/python build/native/address test_native.cpp -fsanitize=address,undefined -fno-sanitize-recover=all
	build/native/address tests/native/corpus
	tests/native/build.sh $(RUN)/python build/native/thread test_native.cpp -fsanitize=thread
	TSAN_OPTIONS=halt_on_error=1 build/native/thread tests/native/corpus

bench-load: build ## compare with other loaders and with the floor; about 15 minutes on 2 cores
	$(RUN)/python benchmarks/bench_load.py --json benchmarks/results/load.json

gpu-check: ## on a machine with an NVIDIA GPU: build, test, sanitize, trace and measure with PYTHON's own torch
	$(PYTHON) benchmarks/gpu_check.py

clean: ## remove builds and the environment
	rm -rf build dist $(VENV) python/epload/*.so python/*.egg-info
