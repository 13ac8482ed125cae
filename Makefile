# Every target works on a fresh machine: what it needs is installed into .venv first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
KERNEL_SOURCES := $(shell find placement moe_serve -name '*kernels*.py') placement/split/checks.py
FIRST_SEED ?= 0
SEEDS ?= 200
INPUTS ?= 1000000
MINUTES ?= 60
SEED ?= 0
OUT ?=
TARGET ?=
ONLY ?=
JOBS ?=
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint fmt types cover proto docs sim planted fuzz chaos soak reference picture bench bench-moves peers bench-placement test-adapters clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP) $(KERNELS)  ## create .venv with everything and compile the numba kernels

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing some 2 GB of packages: 2 to 8 minutes without a word'
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@

# numba's cache looks at the file of a kernel, not at those it imports: all are compiled anew when one changes.
$(KERNELS): $(STAMP) $(KERNEL_SOURCES)
	@find placement moe_serve -name '*.nb[ic]' -delete
	$(BIN)/python -m moe_serve.warm_kernels
	@touch $@

demo: setup  ## watch experts move while a model writes text
	$(BIN)/moe-serve demo

test: setup  ## all tests but the slow ones
	$(PYTEST) -m 'not slow'

test-all: setup  ## all tests, with the coverage of both packages
	$(PYTEST) --cov --cov-report=
	$(MAKE) cover

cover:  ## report the coverage that test-all measured
	$(BIN)/coverage report --include='placement/*' --fail-under=100
	$(BIN)/coverage report --include='moe_serve/*' --fail-under=85

lint: setup types  ## format, lint, import contracts, protos, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint protos

fmt: setup  ## format and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy --strict on both packages
	$(BIN)/mypy

proto: setup  ## regenerate moe_serve/rpc/v1 from protos/
	$(BIN)/python protos/generate.py

docs: setup  ## check links, the tree and the module names of docs/
	$(PYTEST) tests/architecture/test_docs.py

sim: setup  ## live through seeds of the simulated service: make sim SEEDS=200 FIRST_SEED=0
	$(BIN)/python -m tests.simulation.campaign --first-seed $(FIRST_SEED) --seeds $(SEEDS)

planted: setup  ## plant bugs into copies of the tree, each must be caught: make planted ONLY=name JOBS=2
	$(BIN)/python -m tests.planted.run $(addprefix --only ,$(ONLY)) $(addprefix --jobs ,$(JOBS))

fuzz: setup  ## feed every decoder bytes: make fuzz INPUTS=1000000 TARGET=wire_frames (all without TARGET)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[fuzz]' || echo 'without atheris: not guided by coverage'
	$(BIN)/python -m tests.fuzz.run --inputs $(INPUTS) $(addprefix --target ,$(TARGET))

chaos: setup  ## kill, pause and partition parts of a running service
	$(PYTEST) tests/chaos

soak: setup  ## random faults under load: make soak MINUTES=60 SEED=0 OUT=results.json
	$(BIN)/python -m tests.soak.run --minutes $(MINUTES) --seed $(SEED) $(addprefix --out ,$(OUT))

reference: setup  ## regenerate docs/reference from the code
	$(BIN)/python -m docs.make_reference
	$(BIN)/python -m docs.make_monitoring

picture: setup  ## make the pictures of the page, light and dark, from a run of the demo
	$(BIN)/python -m docs.make_page_image

bench: setup  ## ratios of the data path and of the compute backends
	$(BIN)/python -m benchmarks.dataplane
	$(BIN)/python -m benchmarks.compute

bench-moves: setup  ## what moving experts costs callers; a million contributions audited; ten minutes
	$(BIN)/python -m benchmarks.migrating

peers: $(STAMP)  ## fetch the published planners' files into .peers/ (unpacked, never committed)
	$(BIN)/python -m benchmarks.placement_fetch

test-adapters: setup  ## hold the adapters against the files that `make peers` fetches
	@ls "$${PEERS_DIR:-.peers}"/{vllm,sglang}_eplb/SOURCE >/dev/null 2>&1 || $(MAKE) peers
	$(PYTEST) tests/adapters -m adapters

bench-placement: setup  ## balance, writes and CPU of our planner beside published ones; seeds 0-9
	$(BIN)/python -m benchmarks.placement --docs

clean:  ## remove what tools and builds left; .venv stays
	rm -rf build dist .coverage .coverage.* htmlcov .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find moe_serve placement tests benchmarks protos -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
