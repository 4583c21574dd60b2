# make demo    two SSH hosts in one process and a real DDP run on them
# make test    all checks: ruff, mypy, every test
# make lint    ruff and mypy alone
# make bench   timings against clush and torchrun, printed as tables
# make screenshots   the pictures of the README, from a real job
# make clean   remove what these made
#
# A fresh Debian machine needs Python 3.10 or newer, and nothing else. As root, `make test` installs the Debian
# packages that the cluster of network namespaces needs; without root it says which tests are skipped.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Hundreds of short processes: none compiles what another has.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo test lint bench screenshots clean system

# 3.11 first: a torch wheel that lies ready on the machine is made for it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo "$$p" && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
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
	$(BIN)/mypy
	@for example in examples/*/*.py; do echo $(BIN)/mypy $$example; $(BIN)/mypy $$example; done

# A file's tests stay on one worker, and the files come in their order: those of real hosts, the longest, at the start.
# What fails there is told, and has one more try with the machine to itself: real hosts share its cores with the rest.
test: system lint
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS) || { \
		status=$$?; [ $$status -eq 1 ] || exit $$status; \
		echo "failed beside other tests, so once more alone:"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(TESTS); }

screenshots: $(STAMP)
	$(BIN)/python -m tests.tui.screenshots docs

bench: system $(STAMP)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
