# `make help` lists what there is. `make demo` and `make test` need Python >= 3.11 and make, nothing
# else: they build .venv on the first run and again when pyproject.toml changes.

PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2

# What `make demo` runs, in so many processes. DEMO_FLAGS adds to the comparison:
# make demo JOBS=4 DEMO_FLAGS='--out runs/mine'
JOBS ?= 2
DEMO = compare --models linear_attention,gated_delta_net,longhorn,rls,titans,softmax_attention \
	--task text --task capacity --jobs $(JOBS)
DEMO_FIGURE = reproduce ttr-fig3 --seeds 1 --jobs $(JOBS)
DEMO_FLAGS ?=
BENCH_FLAGS ?=
PYTEST_FLAGS ?=
# make gpu GPU_FLAGS='--only linear,deep --out runs/gpu'
GPU_FLAGS ?=

BIN := $(VENV)/bin
# Python compiles the modules that it imports. Compiling all installed ones takes a minute.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
STAMP := $(VENV)/.recollect

# One thread per worker, or the workers would fight over the cores. Bytecode is stored, or every
# process that a test starts would compile the package again.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# A file's tests share fixtures, caches and compiled graphs, so one worker runs all of them.
PARALLEL = -n $(WORKERS) --dist loadfile

SUITABLE_TORCH = import torch; v = torch.__version__.split("."); \
	assert (int(v[0]), int(v[1])) >= (2, 9)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu gpu lint types format docs bench dist clean distclean setup

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: export PYTHONDONTWRITEBYTECODE =
demo: $(STAMP)-demo  ## train and compare six architectures on text and on recall; one figure of a paper
	$(BIN)/recollect $(DEMO) $(DEMO_FLAGS)
	$(BIN)/recollect $(DEMO_FIGURE)

test: $(STAMP)-dev  ## everything that continuous integration runs
	@$(MAKE) --no-print-directory --jobs 2 lint types
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu' $(PYTEST_FLAGS)

test-slow: $(STAMP)-dev  ## the tests that take more than a few seconds
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m 'slow and not gpu' $(PYTEST_FLAGS)

test-gpu: $(STAMP)-dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

gpu: $(STAMP)-dev  ## measure errors, times and memory on a GPU, in nine minutes; runs/gpu
	$(BIN)/python scripts/gpu_run.py $(GPU_FLAGS)

lint: $(STAMP)-dev  ## style, formatting, plain words, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_style.py

# Pyright is a Node program that its Python package fetches on the first run. Where that cannot
# work (no network), say so and go on: nothing else depends on it. CHECK_TYPES=must forbids that.
types: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
types: $(STAMP)-dev  ## static types: strict for choices, recipe and engines, standard elsewhere
	@if $(BIN)/pyright --version >/dev/null 2>&1; then \
		set -x; $(BIN)/pyright --pythonpath $(BIN)/python & \
		$(BIN)/pyright --project pyright-strict.json --pythonpath $(BIN)/python; \
		strict=$$?; wait $$! && exit $$strict; \
	elif [ '$(CHECK_TYPES)' = must ]; then \
		echo 'types: pyright could not fetch its Node package; connect once and run again' >&2; \
		exit 1; \
	else \
		echo 'types: NOT CHECKED: pyright could not fetch its Node package (no network?);' \
			'connect once and run `make types`' >&2; \
	fi

format: $(STAMP)-dev  ## put the code into the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)-dev  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(STAMP)-demo  ## speed and memory against peers, side by side in one run
	$(BIN)/recollect bench $(BENCH_FLAGS)

dist: $(STAMP)-dev  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m hatchling build

setup: $(STAMP)-dev  ## only make the environment for development

clean:  ## remove builds and caches (not .venv, not runs)
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

# torch comes first and alone, so that nothing after it can pick another build. An environment that
# already has a suitable torch (a GPU machine's, usually) is used as it is: the new one sees its
# packages, through --system-site-packages or, where that environment is itself a virtual one,
# through a path file.
$(STAMP)-torch:
	@test -n '$(PYTHON)' || { echo 'recollect needs Python 3.11 or newer; none was found.' \
		'Install one, or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	@set -e; \
	if $(PYTHON) -c '$(SUITABLE_TORCH)' 2>/dev/null; then \
		echo 'setup: using the torch that $(PYTHON) already has'; \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
		$(BIN)/python -c '$(SUITABLE_TORCH)' 2>/dev/null || $(PYTHON) -c \
			'import sysconfig; print(sysconfig.get_path("purelib"))' \
			> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"; \
	else \
		$(PYTHON) -m venv $(VENV); \
	fi; \
	if ! $(BIN)/python -c '$(SUITABLE_TORCH)' 2>/dev/null; then \
		echo 'setup: installing $(TORCH) (once)'; \
		$(PIP) '$(TORCH)'; \
	fi
	@touch $@

$(STAMP)-demo: $(STAMP)-torch pyproject.toml
	@echo 'setup: installing recollect-layers[lm,cli,plot]'
	@$(PIP) --editable '.[lm,cli,plot]'
	@touch $@

$(STAMP)-dev: $(STAMP)-torch pyproject.toml
	@echo 'setup: installing recollect-layers[lm,cli,plot,dev]'
	@$(PIP) --editable '.[lm,cli,plot,dev]'
	@touch $@ $(STAMP)-demo
