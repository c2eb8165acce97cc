# attnbench: `make run` and `make test` set up everything they need in .venv; `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SCENARIO ?= scenarios/smoke.yaml
WORKERS  ?= auto

.DEFAULT_GOAL := help
.PHONY: help setup run test test-gpu check lint format build sanitize schema clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with the tested versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: $(READY) ## Run SCENARIO (default scenarios/smoke.yaml) on this machine
	$(BIN)/attnbench run $(SCENARIO)

test: $(READY) ## Run the CPU tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu -n $(WORKERS)

test-gpu: $(READY) ## Run the GPU tests (needs a CUDA device)
	$(BIN)/python -m pytest tests/gpu -m "not quiet" -n 6
	$(BIN)/python -m pytest tests/gpu -m quiet

check: $(READY) ## Check our kernels against fp64 over the built-in corpus
	$(BIN)/attnbench check

lint: $(READY) ## ruff, mypy and clang-format, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find kernels_native examples -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format --dry-run --Werror

format: $(READY) ## Format Python and CUDA sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find kernels_native examples -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format -i

build: $(READY) ## Compile every native kernel ahead of time (needs no GPU)
	$(BIN)/attnbench build

sanitize: $(READY) ## Run the native kernels under compute-sanitizer (needs a Hopper GPU and the tool on PATH)
	for tool in "memcheck --report-api-errors no" racecheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python tests/gpu/sanitizer_cases.py || exit 1; done

schema: $(READY) ## Regenerate the scenario JSON Schema
	$(BIN)/attnbench schema > attnbench/scenario/scenario.schema.json

clean: ## Remove the environment and local caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
