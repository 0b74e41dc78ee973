# From a bare machine with python3 (3.11 or newer) and make: every target first makes its own environment under .venv.
#   make demo ARGS="--temperature 1"     PYTHON=python3.12 make test

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKED_EXTRAS := --extra models --extra data --extra plots --extra serve --extra dev
# Two processes: tracing and compiling, which most of a test's time is, keep one core each busy. `loadfile` keeps the tests of a file
# together, which share what they have compiled.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-header

SHELL := bash
export XLA_FLAGS ?=
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-all lint bench lock clean install
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/python -m experiments.demo $(ARGS)

# Most programs of the tests run a few times at tiny sizes: without LLVM's optimisation they are compiled in two thirds of the time.
# `test-all` runs the same tests as users run the code.
test: $(STAMP)
	XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0" $(PYTEST) -m "not slow" $(ARGS)

# The log is committed, so it names no folder of this machine.
test-all: $(STAMP)
	mkdir -p experiments/results
	$(PYTEST) --durations=20 $(ARGS) 2>&1 | sed 's|$(CURDIR)/||g' | tee experiments/results/test_all.log

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python -m experiments.profile_steps $(ARGS)
	$(BIN)/python -m pallas_kernels.bench

# Versions and hashes for every Python from 3.11 on; --universal writes no registry host, unlike uv.lock.
lock: $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --no-header --generate-hashes --upgrade --quiet \
	  $(LOCKED_EXTRAS) --output-file requirements.lock

install: $(STAMP)

clean:
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs uv from its own entry in the lock, hashes included; without a lock (`make lock` writes one), the newest.
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dspark-jax needs Python 3.11 or newer, and $(PYTHON) \
is %d.%d: name another with make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	if [ -s requirements.lock ]; then awk '/^[^ #]/ {keep = /^uv==/} keep' requirements.lock > $(VENV)/uv.txt; else echo uv > $(VENV)/uv.txt; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/uv.txt

# The lock is complete, hence --no-deps; hatchling is in it, hence --no-build-isolation.
$(STAMP): requirements.lock pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@
