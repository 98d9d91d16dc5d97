# `make demo` and `make test` do everything on a fresh machine: Python 3.11 or newer, git and make.
#
#   PYTHON=python3.12   another interpreter
#   TORCH_INDEX=URL     take torch from another package index. On Linux the ordinary index may have
#                       only the build for NVIDIA GPUs (several GB); without such a GPU, name the
#                       index of the CPU build ("Get started" on pytorch.org gives its address)
#   JOBS=2              processes of the test suite

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test test-fast check format clean

help:
	@echo "make demo       watch the default model say the same in fewer forwards"
	@echo "make test       run all tests (the first time fetches the default model, 93 MB)"
	@echo "make test-fast  run the tests that need no model"
	@echo "make check      lint, format check, types"
	@echo "make format     format the code, fix what lint can fix"
	@echo "make setup      only install into $(VENV)"
	@echo "make clean      remove $(VENV) and caches"

setup: $(STAMP)

# The stamp is written last: an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: MARS needs Python 3.11 or newer; found: $(or $(PYTHON),none)." >&2; \
		echo "Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV) (a few minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/mars demo

# One thread per process: JOBS processes share the cores without getting in each other's way.
test: $(STAMP)
	@$(BIN)/mars pull
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow'

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
