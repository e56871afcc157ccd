# `make demo` and `make test` need nothing but a Python; the rest comes into $(VENV).
#
#   make PYTHON=/opt/python3.12/bin/python3 demo   another interpreter
#   make VENV=~/envs/gockpt test                   another environment

VENV ?= .venv
# The newest interpreter on the PATH that can make an environment (Debian's needs python3-venv).
PYTHON ?= $(shell for name in python3.14 python3.13 python3.12 python3.11 python3; do \
	$$name -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { command -v $$name; break; }; done)
# Each worker simulates 8 devices and compiles much: more than 4 of them only get in each other's
# way. Tests of one training program share a worker, and so its compilations (tests/conftest.py).
PYTEST_FLAGS ?= -q -n auto --maxprocesses 4 --dist loadgroup

STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo test kills scale figures lint types clean

help:
	@echo 'make venv    create $(VENV) with gockpt_jax and all that the targets below need'
	@echo 'make demo    train, kill inside a checkpoint window, resume, compare bit for bit'
	@echo 'make test    all tests'
	@echo 'make kills   the campaign of random kills: 100 of them, in 25 runs'
	@echo 'make scale   the tables of docs/scale.md, anew'
	@echo 'make figures figures and tables of the documents, from bench/results'
	@echo 'make lint    ruff: rules and format'
	@echo 'make types   mypy'
	@echo 'make clean   remove $(VENV), caches and runs'

venv: $(STAMP)
	@:

# Written last: an interrupted installation is repeated, a finished one is not until
# pyproject.toml changes. The package itself is editable, so its sources need no rule.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { \
		echo 'error: no Python >= 3.11 with venv and ensurepip on the PATH.' >&2; \
		echo 'Install one (Debian, Ubuntu: apt install python3-venv) or say make PYTHON=...' >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'error: $(PYTHON) is not a Python >= 3.11.' >&2; exit 1; }
	@echo 'installing into $(VENV) with $(PYTHON)'
	@test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	@"$(BIN)/python" -m pip install -qq --disable-pip-version-check -e '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

kills: $(STAMP)
	@GOCKPT_KILL_CHAINS=25 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/faults/test_random_kills.py

scale: $(STAMP)
	@$(BIN)/python -m bench.scale

figures: $(STAMP)
	@$(BIN)/python -m bench figures

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary

clean:
	@rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
