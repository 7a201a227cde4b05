# Every target creates the environment it needs. Set PYTHON, TORCH and VENV to override: make test TORCH=torch==2.14.0 VENV=.venv-2.14
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
RUN := $(VENV)/bin
CAMPAIGN := PYTHONPATH=tests:benchmarks $(RUN)/python -m campaigns
BENCH_VENV ?= .venv-bench
BENCH := $(BENCH_VENV)/bin
# The tests look at the kernels also where torch has no CUDA, if there is a compiler for them.
EPLOAD_CUDA ?= $(if $(shell command -v nvcc),1,auto)
DOCS_VENV ?= .venv-docs
WHEEL_TORCH ?= 2.11 2.12 2.13 2.14 2.15
NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)
CPP := tests/native/cpp
FAKES := $(wildcard tests/support/fakedev/*.cpp tests/support/fakedev/*.h $(CPP)/*.cpp $(CPP)/*.h tests/npu/*.cpp)
SOURCES := python tests benchmarks examples setup.py $(wildcard docs/*.py)
FAULTS ?= 300
SEED ?= 0
CHAOS_SECONDS ?= inf
FUZZ_SECONDS ?= 600
WORKERS ?= 1
TEST_WORKERS ?= 3
PARALLEL := -n $(TEST_WORKERS) --dist worksteal
RUNS ?= 100

# The oldest and the newest torch that epload supports (setup.py).
OLDEST ?= torch==2.11.0
NEWEST ?= torch==2.15.0
# The oldest transformers that epload supports (python/epload/mapping/transformers.py).
TRANSFORMERS_OLDEST ?= transformers==5.19.0
TORCH_NPU ?= torch-npu==2.13.0
VLLM ?= vllm==0.33.0
SGLANG ?= sglang==0.5.23
VERL ?= verl==0.9.1
MEGATRON ?= megatron-core==0.16.1
# In environments of their own, with the libraries that are built into python/epload for the same torch.
ALONE = PYTHONPATH=$(abspath python):$(abspath tests) $(abspath $(1))/bin/python -m pytest --confcutdir . --override-ini testpaths=. \
  --override-ini "pythonpath=. .."

# Every target with a description is a command, not a file.
.PHONY: $(shell grep -oE '^[a-z-]+:.*\#\#' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*//')

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

$(VENV)/ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet "$(TORCH)" -r requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/ready $(NATIVE) CMakeLists.txt setup.py pyproject.toml
	EPLOAD_CUDA=$(EPLOAD_CUDA) $(RUN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

build: $(VENV)/built ## create the environment and build epload into it

# More workers than the 2 cores that CI has: ranks wait for each other, and tests of timeouts for those to pass.
test: build ## run the whole test suite with TEST_WORKERS=3
	$(RUN)/python -m pytest $(PARALLEL)

# Not an editable install, which would replace the libraries in python/epload that another torch uses.
test-smoke: $(VENV)/ready ## run the tests listed in tests/smoke.txt with TORCH in VENV, without CUDA kernels
	EPLOAD_CUDA=0 PATH="$(abspath $(RUN)):$$PATH" \
	  $(RUN)/pip install --quiet --force-reinstall --no-build-isolation --no-deps .
	$(RUN)/python -m pytest $(PARALLEL) @tests/smoke.txt

# Mostly downloads, so that .ci/run makes them while it lints.
environments: ## create the environments of test-npu, test-verl, test-oldest, test-newest and test-transformers-oldest
	$(MAKE) $(VENV)-npu/ready
	$(MAKE) $(VENV)-verl/ready
	$(MAKE) $(VENV)-oldest/ready TORCH="$(OLDEST)" VENV=$(VENV)-oldest
	$(MAKE) $(VENV)-newest/ready TORCH="$(NEWEST)" VENV=$(VENV)-newest
	$(MAKE) $(VENV)-transformers/ready

test-oldest: ## run test-smoke with the oldest supported torch, in its own environment
	$(MAKE) test-smoke TORCH="$(OLDEST)" VENV=$(VENV)-oldest

test-newest: ## run test-smoke with the newest supported torch, in its own environment
	$(MAKE) test-smoke TORCH="$(NEWEST)" VENV=$(VENV)-newest

$(VENV)-transformers/ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)-transformers
	$(VENV)-transformers/bin/pip install --quiet "$(TORCH)" -r requirements-dev.txt "$(TRANSFORMERS_OLDEST)"
	touch $@

# With the libraries that are built into python/epload for the same torch.
test-transformers-oldest: build $(VENV)-transformers/ready ## run the tests in tests/transformers.txt with the oldest supported transformers
	PYTHONPATH=python $(VENV)-transformers/bin/python -m pytest $(PARALLEL) @tests/transformers.txt

test-frameworks: build $(VENV)-transformers/ready ## compare the README's recipe with from_pretrained for all families on 2 and 4 ranks, with the newest and the oldest transformers
	EPLOAD_ALL_FAMILIES=1 $(RUN)/python -m pytest $(PARALLEL) tests/contracts/frameworks
	EPLOAD_ALL_FAMILIES=1 PYTHONPATH=python $(VENV)-transformers/bin/python -m pytest $(PARALLEL) tests/contracts/frameworks

$(VENV)-npu/ready:
	$(PYTHON) -m venv $(VENV)-npu
	$(VENV)-npu/bin/pip install --quiet "$(TORCH)" numpy pyyaml pytest tqdm "setuptools>=77" "cmake>=3.22" "pybind11>=2.13" ninja wheel
	$(VENV)-npu/bin/pip install --quiet --no-deps "$(TORCH_NPU)"
	touch $@

test-npu: $(VENV)-npu/ready ## test the Ascend backend with the real torch_npu over a fake CANN, in its own environment
	EPLOAD_NPU=1 EPLOAD_CUDA=0 PATH="$(abspath $(VENV)-npu/bin):$$PATH" \
	  $(VENV)-npu/bin/pip install --quiet --force-reinstall --no-build-isolation --no-deps .
	cd tests/npu && $(abspath $(VENV)-npu/bin/python) -m pytest --confcutdir . --override-ini testpaths=. --override-ini pythonpath=.

$(VENV)-vllm/ready: tests/vllm/environment.sh
	PYTHON=$(PYTHON) tests/vllm/environment.sh $(VENV)-vllm "$(TORCH)" "$(VLLM)" "$(MEGATRON)"
	touch $@

test-vllm: build $(VENV)-vllm/ready ## test against vLLM's own model classes and weight transfer, in its own environment (2.8 GB)
	cd tests/vllm && $(call ALONE,$(VENV)-vllm)

$(VENV)-sglang/ready: tests/sglang/environment.sh tests/sglang/standins/sgl_kernel/__init__.py
	PYTHON=$(PYTHON) tests/sglang/environment.sh $(VENV)-sglang "$(TORCH)" "$(SGLANG)" "$(MEGATRON)"
	touch $@

test-sglang: build $(VENV)-sglang/ready ## test against SGLang's own model classes, and running engines and servers, in its own environment (2.8 GB)
	cd tests/sglang && $(call ALONE,$(VENV)-sglang)

$(VENV)-verl/ready: tests/verl/requirements.txt
	$(PYTHON) -m venv $(VENV)-verl
	$(VENV)-verl/bin/pip install --quiet "$(TORCH)" numpy pytest
	$(VENV)-verl/bin/pip install --quiet -r tests/verl/requirements.txt
	$(VENV)-verl/bin/pip install --quiet --no-deps "$(VERL)"
	touch $@

test-verl: build $(VENV)-verl/ready ## test ranks that are Ray actors, and a backend of verl's checkpoint engine, in their own environment
	cd tests/verl && $(call ALONE,$(VENV)-verl)

$(VENV)-megatron/ready: tests/megatron/requirements.txt
	$(PYTHON) -m venv $(VENV)-megatron
	$(VENV)-megatron/bin/pip install --quiet "$(TORCH)"
	$(VENV)-megatron/bin/pip install --quiet -r tests/megatron/requirements.txt
	$(VENV)-megatron/bin/pip install --quiet --no-deps "$(MEGATRON)"
	touch $@

# Forward passes of experts and of latent attention need megatron-core 0.19 and with it Python 3.12:
# make test-megatron PYTHON=python3.12 VENV=.venv-3.12 MEGATRON=megatron-core==0.19.2
test-megatron: build $(VENV)-megatron/ready ## test loads, saves and syncs of Megatron-Core's models on CPU, in their own environment (1.2 GB)
	cd tests/megatron && $(call ALONE,$(VENV)-megatron)

measure: ## print the size of the repository and of its structure, each with its limit
	$(PYTHON) tests/support/house.py

lint: $(VENV)/ready ## run ruff, mypy (strict, on python/), the import-order check and clang-format
	$(RUN)/ruff check $(SOURCES)
	$(RUN)/ruff format --check $(SOURCES)
	$(RUN)/mypy
	PYTHONPATH=python $(RUN)/lint-imports --no-cache
	$(RUN)/clang-format --dry-run --Werror $(NATIVE) $(FAKES)

format: $(VENV)/ready ## format the sources and apply lint fixes
	$(RUN)/ruff check --fix $(SOURCES)
	$(RUN)/ruff format $(SOURCES)
	$(RUN)/clang-format -i $(NATIVE) $(FAKES)

demo: build ## load a Mixture-of-Experts checkpoint over two emulated nodes
	$(RUN)/python examples/demo/demo.py

demo-sync: build ## sync a trainer's weights into a tensor-parallel engine of another job, after each of three steps
	$(RUN)/python examples/demo/demo_sync.py

chaos: build ## replay the regressions, inject FAULTS=300 seeded faults from SEED=0 on 4 ranks, check each outcome
	$(CAMPAIGN).chaos --regressions
	$(CAMPAIGN).chaos --faults $(FAULTS) --seed $(SEED) --seconds $(CHAOS_SECONDS)

chaos-sync: build ## inject FAULTS=300 seeded faults into live syncs, starting at SEED=0, and check each outcome
	$(CAMPAIGN).chaos_sync --faults $(FAULTS) --seed $(SEED) --seconds $(CHAOS_SECONDS)

sync-matrix: build ## compare every layout, stage, delta, verify and format of a sync with the libraries of reference, bit for bit
	$(CAMPAIGN).sync_matrix

chaos-save: build ## inject FAULTS=300 seeded faults into saves, starting at SEED=0, and check each outcome
	$(CAMPAIGN).chaos_save --faults $(FAULTS) --seed $(SEED) --seconds $(CHAOS_SECONDS)

census: build ## load and check every class of the installed transformers that builds from a reduced config; WORKERS=1
	$(CAMPAIGN).census --workers $(WORKERS)

fuzz: build ## fuzz the parsers for FUZZ_SECONDS=600 with hypothesis, and with AFL++ if installed
	$(CAMPAIGN).fuzz --seconds $(FUZZ_SECONDS)

replaced: build ## run RUNS=100 loads, starting at SEED=0, whose checkpoint is replaced during the load; each must be correct or fail on every rank
	$(CAMPAIGN).replaced --runs $(RUNS) --seed $(SEED)

sanitize: build ## run the native tests under AddressSanitizer with UBSan, and under ThreadSanitizer
	$(CPP)/build.sh $(RUN)/python build/native/address test_native.cpp -fsanitize=address,undefined -fno-sanitize-recover=all
	build/native/address $(CPP)/corpus
	$(CPP)/build.sh $(RUN)/python build/native/thread test_native.cpp -fsanitize=thread
	TSAN_OPTIONS=halt_on_error=1 build/native/thread $(CPP)/corpus

$(BENCH_VENV)/built: benchmarks/requirements.txt $(NATIVE) CMakeLists.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH)/pip install --quiet "$(TORCH)"
	$(BENCH)/pip install --quiet -r benchmarks/requirements.txt
	EPLOAD_CUDA=$(EPLOAD_CUDA) $(BENCH)/pip install --quiet -e .
	touch $@

bench: $(BENCH_VENV)/built ## benchmark every loader over loopback; writes benchmarks/results.md and data/
	$(BENCH)/python benchmarks/bench_load.py --docs
	$(BENCH)/python benchmarks/bench_few.py --docs

bench-quick: $(BENCH_VENV)/built ## the same with a twelfth of the tensors; writes to benchmarks/results/; under 10 minutes
	$(BENCH)/python benchmarks/bench_load.py --quick

bench-net: $(BENCH_VENV)/built ## benchmark over shaped links (root), then simulate; writes benchmarks/results.md and data/
	$(BENCH)/python benchmarks/bench_net.py --docs
	$(BENCH)/python benchmarks/simulate.py --docs

bench-net-quick: $(BENCH_VENV)/built ## the same with 2 and 4 nodes and 80 MB (root); writes to benchmarks/results/
	$(BENCH)/python benchmarks/bench_net.py --quick

bench-control: $(BENCH_VENV)/built ## benchmark the control plane with 4 to 512 ranks; writes benchmarks/results.md and data/
	$(BENCH)/python benchmarks/bench_control.py --docs

bench-slow-store: $(BENCH_VENV)/built ## benchmark loads from a store that takes 1 ms a request; writes benchmarks/results.md
	$(BENCH)/python benchmarks/bench_slow_store.py --docs

bench-cold: $(BENCH_VENV)/built ## benchmark reloads from a cold disk and of larger checkpoints (17 GB of disk); writes benchmarks/results.md
	$(BENCH)/python benchmarks/bench_cold.py --docs
	$(BENCH)/python benchmarks/bench_cold.py --layers 78 --files 6 --modes auto --repeat 3 --docs
	$(BENCH)/python benchmarks/bench_cold.py --layers 52 --warm --modes auto --repeat 5 --docs

bench-sync: $(BENCH_VENV)/built ## benchmark live sync over loopback and shaped links (root); writes benchmarks/results.md
	$(BENCH)/python benchmarks/bench_sync.py --docs

bench-save: $(BENCH_VENV)/built ## benchmark saves of an FSDP2 model; writes benchmarks/results.md
	$(BENCH)/python benchmarks/bench_save.py --docs

simulate: $(BENCH_VENV)/built ## run the simulator alone on the measurements in benchmarks/data/; writes benchmarks/results.md; takes seconds
	$(BENCH)/python benchmarks/simulate.py --docs

gpu-check: ## on a machine with an NVIDIA GPU: build, test, sanitize, trace and benchmark with PYTHON's own torch
	$(PYTHON) benchmarks/gpu_check.py

$(DOCS_VENV)/ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -r docs/requirements.txt
	touch $@

docs: $(DOCS_VENV)/ready ## build the site into site/, in its own environment; broken links and what docs/checks.py finds are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

wheels: ## build and test a wheel for each torch minor in WHEEL_TORCH="2.11 2.12 2.13 2.14 2.15" into dist/; takes long
	for minor in $(WHEEL_TORCH); do .ci/wheels build $$minor && .ci/wheels test $$minor || exit 1; done

clean: ## remove build outputs and environments
	rm -rf build dist site .venv-wheels $(DOCS_VENV) $(VENV) $(VENV)-npu $(VENV)-vllm $(VENV)-sglang $(VENV)-verl $(VENV)-megatron $(VENV)-oldest $(VENV)-newest $(VENV)-transformers $(BENCH_VENV) python/epload/*.so python/*.egg-info
