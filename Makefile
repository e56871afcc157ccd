# `make demo` and `make test` need nothing but a Python; the rest comes into $(VENV).
#
#   make PYTHON=/opt/python3.12/bin/python3 demo   another interpreter
#   make VENV=~/envs/gockpt test                   another environment
#   make COMPAT_VENV=~/envs/compat test-compat     where its two environments go

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
.PHONY: help venv demo test thorough test-compat test-compat-oldest test-compat-newest test-remote kills interrupts errors lives soak programs jobs parity merges compiled compiled-h100 compiled-v5e compiled-v5e-newest pretended invariants scale bench figures lint types clean

help:
	@echo 'make venv    create $(VENV) with gockpt_jax and all that the targets below need'
	@echo 'make demo    train, kill inside a checkpoint window, resume, compare bit for bit'
	@echo 'make test    the tests'
	@echo 'make thorough  the tests that make test leaves out, too, compiled as users do'
	@echo 'make test-compat  the library and its examples with the oldest and the newest versions'
	@echo 'make test-remote  checkpoints in buckets, against emulators of S3 and GCS'
	@echo 'make kills   the campaign of random kills: 100 of them, in 25 runs'
	@echo 'make interrupts  Ctrl-C in the library: 90 lives, a few in each; and at each place of a period of saves'
	@echo 'make errors  an error at each place of the threads of the background, in a period of saves'
	@echo 'make invariants  all programs of the tests on 1 and on 8 devices, as users compile them'
	@echo 'make lives   random lives of training runs, over all programs of the tests: 94 of them'
	@echo 'make soak    thousands of saves: nothing that a manager holds may grow'
	@echo 'make jobs    random lives of jobs of several processes, with faults: 60 of them, slow'
	@echo 'make programs  random training programs in random lives: 50 of them, three lives each on 1 and 8 devices'
	@echo 'make parity  random lives of a stock manager and ours, side by side: 60 of them'
	@echo 'make merges  what the compiler merges with a retained value: all pairs of operations'
	@echo 'make compiled  the same, and random programs, as the compilers of an H100 and a TPU (the one of this JAX, and the newest) make them; needs neither'
	@echo 'make pretended  invariants and windows with pulls and replay as on an accelerator'
	@echo 'make scale   the tables of docs/scale.md, anew'
	@echo 'make figures figures and tables of the documents, from bench/results'
	@echo 'make bench   what can be measured without an accelerator, a few minutes'
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

# Compilation is most of it. `make test HURRY=` compiles as users do, and so do the campaigns below,
# but for those of several processes (tests/hurry.py).
HURRY ?= yes

test: $(STAMP)
	@GOCKPT_HURRY=$(HURRY) $(BIN)/python -m pytest $(PYTEST_FLAGS)

# All cases of products of arguments (of which `make test` has each argument's values), all programs.
thorough: $(STAMP)
	@GOCKPT_THOROUGH=1 GOCKPT_INVARIANTS=all $(BIN)/python -m pytest $(PYTEST_FLAGS)

# The lower ends of pyproject.toml, exactly (Orbax 0.11.33 was released for JAX of that time), and
# the newest of everything that the package registry has. Each has an environment of its own.
OLDEST := orbax-checkpoint==0.11.33 jax==0.7.2 flax==0.12.0 tensorstore==0.1.78
NEWEST := orbax-checkpoint jax flax optax tensorstore
COMPAT_VENV ?= .venv-compat
COMPAT_TESTS := tests/training tests/transfer tests/replay tests/window tests/storage tests/faults \
	tests/multiprocess tests/integrations tests/test_manager.py tests/test_every_manager.py tests/test_v1.py \
	tests/test_docs.py tests/test_example.py tests/test_nnx_example.py

test-compat: test-compat-oldest test-compat-newest

test-compat-oldest: $(COMPAT_VENV)-oldest/.installed
	@$(COMPAT_VENV)-oldest/bin/python -m pytest $(PYTEST_FLAGS) $(COMPAT_TESTS)

test-compat-newest: $(COMPAT_VENV)-newest/.installed
	@$(COMPAT_VENV)-newest/bin/python -m pytest $(PYTEST_FLAGS) $(COMPAT_TESTS)

$(COMPAT_VENV)-oldest/.installed: pyproject.toml Makefile
	@test -x "$(@D)/bin/python" || "$(PYTHON)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check -e '.[test]' $(OLDEST)
	@touch $@

$(COMPAT_VENV)-newest/.installed: pyproject.toml Makefile
	@test -x "$(@D)/bin/python" || "$(PYTHON)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check --upgrade \
		-e '.[test]' $(NEWEST)
	@touch $@

# Emulators and the clients of buckets, in an environment of their own.
REMOTE_VENV ?= .venv-remote

test-remote: $(REMOTE_VENV)/.installed
	@$(REMOTE_VENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/remote tests/storage/test_bucket_specs.py

$(REMOTE_VENV)/.installed: pyproject.toml Makefile
	@test -x "$(@D)/bin/python" || "$(PYTHON)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check \
		-e '.[test,gs,s3,test-remote]'
	@touch $@

# From which seed to which: other ones are other programs, lives and faults.
KILLS ?= 0:25
INTERRUPTS ?= 0:90
PLACES ?= 1:4000
ERRORS ?= 1:4000
LIVES ?= 0:94
JOBS ?= 0:60
PROGRAMS ?= 100:150
PARITY ?= 1:61
# Rounds of four saves and more between two looks at what is held; there are four looks.
SOAK ?= 100

kills: $(STAMP)
	@GOCKPT_KILLS=$(KILLS) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/faults/test_random_kills.py

interrupts: $(STAMP)
	@GOCKPT_INTERRUPTS=$(INTERRUPTS) GOCKPT_PLACES=$(PLACES) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/faults/test_interrupted_anywhere.py

errors: $(STAMP)
	@GOCKPT_ERRORS=$(ERRORS) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/faults/test_errors_anywhere.py

lives: $(STAMP)
	@GOCKPT_LIVES=$(LIVES) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/invariants/test_random_lives.py

invariants: $(STAMP)
	@GOCKPT_INVARIANTS=all $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/test_programs.py tests/invariants

soak: $(STAMP)
	@GOCKPT_SOAK=$(SOAK) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/window/test_nothing_grows.py

jobs: $(STAMP)
	@GOCKPT_JOBS=$(JOBS) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/multiprocess/test_lives.py

programs: $(STAMP)
	@GOCKPT_PROGRAMS=$(PROGRAMS) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/invariants/test_random_programs.py

merges: $(STAMP)
	@GOCKPT_MERGES=all $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/training/test_merging.py

# No accelerator, nor CUDA, is needed, but the compilers: of the version of the JAX that is there, in
# an environment of their own, and the newest TPU one in another. One process for each: libtpu lets
# no second one load it.
COMPILED_VENV ?= .venv-compiled
COMPILED_TESTS = JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 GOCKPT_PROGRAMS=$(PROGRAMS) \
	$(<D)/bin/python -m pytest $(PYTEST_FLAGS) -n 0 tests/training/test_compiled.py

compiled: compiled-h100 compiled-v5e compiled-v5e-newest

compiled-h100 compiled-v5e: $(COMPILED_VENV)/.installed
	@GOCKPT_COMPILED=$(@:compiled-%=%) $(COMPILED_TESTS)

compiled-v5e-newest: $(COMPILED_VENV)-newest/.installed
	@GOCKPT_COMPILED=v5e $(COMPILED_TESTS)

$(COMPILED_VENV)/.installed: pyproject.toml Makefile
	@test -x "$(@D)/bin/python" || "$(PYTHON)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check -e '.[test]' 'jax[tpu]'
	@version=$$("$(@D)/bin/python" -c 'import jaxlib; print(jaxlib.__version__)') && \
	"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@

$(COMPILED_VENV)-newest/.installed: pyproject.toml Makefile
	@test -x "$(@D)/bin/python" || "$(PYTHON)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check -e '.[test]'
	@"$(@D)/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --upgrade libtpu
	@touch $@

pretended: $(STAMP)
	@GOCKPT_TEST_PLATFORM=pretended $(BIN)/python -m pytest $(PYTEST_FLAGS) $(addprefix tests/,invariants faults window transfer)

parity: $(STAMP)
	@GOCKPT_PARITY=$(PARITY) $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/test_parity.py

scale: $(STAMP)
	@$(BIN)/python -m bench.scale

figures: $(STAMP)
	@$(BIN)/python -m bench figures

# Ratios only: `make RESULTS=folder bench` writes the records there, one file for each.
BENCHES ?= analysis replay storage transfer memory timeline train
bench: $(STAMP)
	@for name in $(BENCHES); do \
		$(BIN)/python -m bench $$name --quick \
			$(if $(RESULTS),--out "$(RESULTS)/$$name.json") || exit 1; \
	done

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary

clean:
	@rm -rf .venv .venv-* runs build dist .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
