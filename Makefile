# make demo         two SSH hosts in one process and a real DDP run on them
# make fast         the fast tests: under a minute
# make test         all checks: ruff, mypy, every test
# make lint         ruff, mypy and codespell alone
# make costs        every test, with a table of where the time goes, by file
# make coverage     every test, with the coverage of lines and branches
# make flaky        every test three times: quiet, beside two busy processes, on one core; prints what failed where
# make nightly      the long checks: every Python here, every torch that we name, many random examples, benchmarks
# make faults       the fault matrix: 20 seeds of each fault, in about an hour; SUPERVISOR_FAULTS="--seeds 1-3" for fewer
# make gpu          failures of NCCL and CUDA on one GPU, 8 minutes; without one, those that gloo can have
# make bench        timings against clush and torchrun, printed as tables
# make screenshots  the pictures of the README, still and animated, from a real job
# make clean        remove everything that these targets created
#
# A fresh Debian machine needs Python 3.10 or newer, and nothing else. As root, `make test` installs the Debian
# packages that the cluster of network namespaces needs; without root it says which tests are skipped.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Write .pyc files: the tests start hundreds of short processes.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo fast test collect suite flaky costs coverage nightly lint faults gpu bench screenshots clean system

# 3.11 first: a local torch wheel is usually built for it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo "$$p" && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := tests/contract tests/agents tests/screens tests/fuzz tests/fast
WORKERS := $(shell echo $$((2 * $$(nproc))))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH := 2.13.0

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(BIN)/python:
	@bash tests/cluster/install-system-packages.sh python "$(PYTHON)"
	$(or $(PYTHON),python3) -m venv $(VENV)

# Torch first and by itself, so that nothing else chooses its build: a wheel that pip finds without an index, else the
# CPU build from PyTorch's own index. The default build on PyPI brings gigabytes of CUDA, which no test needs.
$(STAMP): pyproject.toml | $(BIN)/python
	@if $(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH)")' 2>/dev/null; then \
		echo "torch $(TORCH) is there"; \
	elif $(PIP) install --quiet --no-deps --no-index "torch==$(TORCH)" 2>/dev/null; then \
		echo "torch $(TORCH) from a local wheel"; \
	elif $(PIP) install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"; then \
		echo "torch $(TORCH), the CPU build"; \
	else \
		echo "no CPU build of torch $(TORCH) for $$($(BIN)/python -V): make clean, then make PYTHON=python3.11 …," >&2; \
		echo "or PIP_FIND_LINKS=DIRECTORY_WITH_THE_WHEEL make …" >&2; exit 1; \
	fi
	$(PIP) install --quiet --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/supervisor demo

system:
	@bash tests/cluster/install-system-packages.sh tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	@for example in examples/*/*.py; do echo $(BIN)/mypy $$example; $(BIN)/mypy $$example; done

fast: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup

# Most of a test's time is waiting, so there are more workers than cores. The groups with the longest tests come first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 15
test: system $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint collect
	@$(MAKE) --no-print-directory suite

# Loads every test once, beside mypy, which uses one core, so that no worker has to compile them again.
collect: $(STAMP)
	@found=$$($(BIN)/python -m pytest --collect-only -q $(TESTS)) || { echo "$$found"; exit 1; }

# Which tests have failed counts only after a whole run: .ci/run tries them again.
NOTED := .pytest_cache/v/cache/lastfailed
suite: $(STAMP)
	@rm -f $(NOTED) .pytest_cache/left_behind
	$(PYTEST) $(TESTS) || { status=$$?; [ $$status -eq 1 ] || rm -f $(NOTED); exit $$status; }

flaky: system $(STAMP)
	$(BIN)/python -m tests.flaky

costs: system $(STAMP)
	$(PYTEST) -p tests.costs $(TESTS)

coverage: system $(STAMP)
	$(PYTEST) --cov=supervisor --cov=remote_agent --cov-branch --cov-report=json:coverage.json $(TESTS)
	@$(BIN)/python -c 'import json; found = json.load(open("coverage.json"))["totals"]; \
		print("lines {percent_statements_covered:.2f} %, branches {percent_branches_covered:.2f} %".format(**found))'

nightly: system lint
	$(BIN)/python -m tests.pythons
	$(BIN)/python -m tests.versions
	PYTEST_TIMEOUT=9000 SUPERVISOR_STRESS_S=3600 $(PYTEST) tests/agents/test_sampler.py -k survives
	PYTEST_TIMEOUT=9000 SUPERVISOR_EXAMPLES=20 SUPERVISOR_FUZZ_S=120 $(PYTEST) $(TESTS)
	$(BIN)/python -m tests.bench

screenshots: $(STAMP)
	$(BIN)/python -m tests.screens.screenshots docs

faults: system $(STAMP)
	$(BIN)/python -m tests.faults

# A GPU machine may have a torch of its own and no network: GPU_PYTHON is the interpreter that has it.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	$(GPU_PYTHON) -m tests.gpu

bench: system $(STAMP)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
