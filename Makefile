# `make demo` and `make test` need nothing before them: each sets up what it uses, once.
# Set-up is redone only when what it depends on changes (pyproject.toml, CMakeLists.txt, csrc/).

PYTHON ?= python3
VENV ?= .venv
OUT ?= demo-out
# Installed first where no NVIDIA driver is found, because torch as a mere dependency would bring a
# CUDA build of several gigabytes. Give an index besides where yours has no CPU build under this
# name: make test TORCH="torch==2.13.0 --index-url ..."
TORCH ?= torch==2.13.0
NATTEN ?= natten==0.21.7

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_STAMP := $(VENV)/.torch-is-installed
DEMO_STAMP := $(VENV)/.demo-is-installed
DEV_STAMP := $(VENV)/.dev-is-installed
# More optimization takes the compiler minutes here.
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
BENCHMARKS := $(wildcard benchmarks/bench_*.py)
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format bench gpu-check ablation native native-test
.PHONY: sanitize clean
.DELETE_ON_ERROR:

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What is installed for development includes all that the demo needs.
demo: $(if $(wildcard $(DEV_STAMP)),$(DEV_STAMP),$(DEMO_STAMP)) ## Train, sample and report on made-up clips, on any machine.
	@$(BIN)/megaslide demo --out $(OUT)

test: $(DEV_STAMP) ## Run the tests.
	@$(BIN)/python -m pytest

test-slow: $(DEV_STAMP) ## Run the tests that take longer than ten seconds each.
	@$(BIN)/python -m pytest -m "slow and not gpu"

check: $(DEV_STAMP) ## Everything a contribution must pass: format, lint, types, layout, tests.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/python -m pytest

format: $(DEV_STAMP) ## Format the code, apply safe lint fixes, write the generated page of the docs.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/generate.py

bench: $(DEV_STAMP) ## Run the benchmarks; each writes JSON.
	@set -e; for script in $(BENCHMARKS); do echo "$$script"; $(BIN)/python "$$script"; done

# Without set-up: it runs where nothing can be installed, on the torch that is there.
gpu-check: ## On a machine with a GPU: check and measure everything in 8 minutes.
	@$(if $(wildcard $(DEV_STAMP)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check

ablation: $(DEV_STAMP) ## Compare kinds of attention on known motion (hours); goes on where stopped.
	@$(BIN)/python -m benchmarks.quality

native: $(TORCH_STAMP) ## Build the native kernels again, as after installing a compiler.
	@$(PIP) install -q --no-deps -e .
	@$(tell_if_not_native)

native-test: $(DEV_STAMP) ## Run the C++ tests; with another compiler: CC=clang CXX=clang++.
	@$(call run_native_tests,native-test,-O3)

sanitize: $(DEV_STAMP) ## The same under sanitizers, with the matrix tiles of AMX emulated.
	@$(call run_native_tests,sanitize,$(SANITIZE),-DMEGASLIDE_EMULATED_TILES=ON)

clean: ## Remove what was built and cached; delete the folder .venv yourself to set up anew.
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(TORCH_STAMP):
	@$(tell_if_no_python)
	@echo "set-up: Python environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --upgrade pip setuptools wheel
	@$(if $(GPU),,echo "set-up: $(TORCH) (no NVIDIA driver found)" && $(PIP) install -q $(TORCH))
	@touch $@

$(DEMO_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	@echo "set-up: megaslide, its native kernels and what the demo needs"
	@$(PIP) install -q -e ".[demo]"
	@$(tell_if_not_native)
	@touch $@

# NATTEN is an independent answer that some tests compare with; they skip without it. It is built
# against the torch that is here, hence outside of build isolation, and not where that would mean
# compiling it for a GPU.
$(DEV_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	@echo "set-up: megaslide, its native kernels and the tools for development"
	@$(PIP) install -q -e ".[dev]"
	@$(if $(GPU),,$(PIP) install -q --no-build-isolation $(NATTEN) || echo "note: no $(NATTEN); some tests will skip")
	@$(tell_if_not_native)
	@touch $@

# 1: folder below build/, which compilers do not share; 2: flags.
define run_native_tests
export PATH="$(BIN):$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-2}; \
folder=build/$(1)-$(notdir $(CXX)) && \
cmake -S . -B $$folder $(3) -DMEGASLIDE_TESTS=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="$(2)" \
  -DCMAKE_CXX_FLAGS="$(2)" -DCMAKE_C_COMPILER=$(CC) -DCMAKE_CXX_COMPILER=$(CXX) >/dev/null && \
cmake --build $$folder >/dev/null && \
ctest --test-dir $$folder --output-on-failure --no-tests=error
endef

define tell_if_no_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
  echo "set-up needs Python 3.11 or later as $(PYTHON); another one: make PYTHON=..." >&2; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  echo "set-up needs Python's venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
endef

# pip shows nothing of a build that succeeded, so a build that left the kernels out must be told.
define tell_if_not_native
$(BIN)/python -c 'import logging, sys; logging.disable(); \
from megaslide.ops.library import why_absent; sys.exit(bool(why_absent()))' || { \
  echo "warning: no native kernels: the slower reference code runs instead." >&2; \
  echo "  fix: install a C++ compiler (g++ 11 or clang++ 14, or later), then run: make native" >&2; }
endef
