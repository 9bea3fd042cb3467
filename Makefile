# Two commands on a fresh machine with Python 3.11:  make quickstart   and   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
SITE := $(VENV)/.site
# What builds the site: mkdocs or zensical.
BUILDER ?= mkdocs
# Another package index, for torch alone:  make test TORCH_INDEX=URL
TORCH_INDEX ?=
# Files of tests run side by side, each with one thread of its own; what starts Ray or deployments stays in two rows,
# which wait so often that a worker more than the processors has something to do.
WORKERS ?= 3
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Tests start hundreds of processes. Where this variable is set, each of them would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1

.PHONY: quickstart test test-most test-long test-fast lint golden bench flowers dist docs docs-serve clean

quickstart: $(STAMP)  ## set up and run the main job
	$(BIN)/python -m experiments.run

# Side by side: types are looked at by one processor.
test: $(KERNELS)  ## set up and check: lint, types, every test that is not in test-long
	$(MAKE) -j 2 lint test-most

test-most: $(KERNELS)
	$(PYTEST) -m "not long"

# Most of what starts Ray or deployments is here, and waits.
test-long: WORKERS = 4
test-long: $(KERNELS)  ## the other tests: long convergence, all systems on all engines, long fuzzing, all pages' experiments
	$(PYTEST) -m long

test-fast: $(KERNELS)  ## while you work: what takes less than a moment
	$(PYTEST) -m "not slow and not long"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/types

golden: $(KERNELS)  ## compare what every system and experiment does at toy size with the records of it
	PYTHONPATH=tests $(BIN)/python tests/golden/golden_runs.py check

bench: $(KERNELS)  ## wire, kernels, peers, engine, graphs, codes: ratios taken in one run
	$(BIN)/python -m experiments.bench wire
	$(BIN)/python -m experiments.bench kernels
	$(BIN)/python -m experiments.bench peers
	$(BIN)/python -m experiments.bench engine
	$(BIN)/python -m experiments.bench graphs
	$(BIN)/python -m coding.bench

flowers: $(KERNELS)  ## the fast tests that touch Flower, and the wheel, beside every current Flower
	.ci/flowers $(ONLY)

dist: $(KERNELS)  ## make both archives of a release in dist/, and try them as users do
	.ci/dist dist
	FEDCOMP_DIST=dist OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deployment/test_installed.py

docs: $(SITE)  ## build the site into site/; a broken link or a public name without a docstring ends it
	$(BIN)/python docs/site/generate.py
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/$(BUILDER) build --strict

docs-serve: docs  ## build the site and show it on port 8000 of this machine
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

# torch first, by its exact version and from its own index where there is one: where the usual index serves no build for
# processors alone, that version brings gigabytes of CUDA libraries.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard fedcomp/kernels/*.c)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcomp needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) )torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(SITE)

# A process compiles what it uses, once, into a cache on the disk; many that start together would all do so.
$(KERNELS): $(STAMP)
	$(BIN)/python -m fedcomp.kernels
	$(BIN)/python -m fedcomp.coding.kernels
	touch $(KERNELS)

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
