# Everything a developer does with the project; `make help` lists it. Needs make, Python and a package index.

PYTHON ?= python3
# Processes that pytest uses. Tests marked `distributed` start several of their own, so they run one at a time.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: pip says only what went wrong.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt
INSTALLED := $(VENV)/.installed

# One thread a process: the tests run several processes, and results don't depend on the number of cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Nothing is fetched at run time, models and data included.
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo test lint format clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## Install the project and its tools into .venv; again only when pyproject.toml or constraints.txt changed
	@echo "ready: $(BIN)/graphpipe"

# torch comes first and by its exact release: it is by far the largest download, and it brings the setuptools that the
# project is then built with, so that no build environment of its own is needed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no '$(PYTHON)' here; name a Python of 3.11 or newer: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "GraphPipe needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"name another one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "setup 1/3: a virtual environment in $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@torch=$$(grep '^torch==' constraints.txt) && echo "setup 2/3: $$torch" && $(PIP_INSTALL) "$$torch"
	@echo "setup 3/3: graphpipe, editable, and the development tools"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Plan, train and verify a small CLIP on handwritten digits; results in demo-out/
	$(BIN)/python examples/clip_digits/demo.py --out demo-out

test: lint ## Check the style, the types and the layers, then run all tests
	$(BIN)/python -m pytest -n $(JOBS) -m "not distributed"
	$(BIN)/python -m pytest -m "distributed and not soak"

lint: $(INSTALLED) ## Check the style, the types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## Format the code and repair what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv, caches and results
	rm -rf $(VENV) demo-out build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
