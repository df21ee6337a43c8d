# Everything from a fresh clone, with nothing but Python 3.11+ (with venv) and make.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
TORCH ?= auto
PIP_ARGS ?=
PARALLEL ?= -n 2 --dist loadfile

BIN := $(VENV)/bin
# With bytecode, whatever the environment says: tests start some hundred processes, which would all compile Quire again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)

.PHONY: help setup serve chat test test-all

help:
	@echo "make serve [PORT=8000] [MODEL=$(MODEL)]   set everything up and serve the model over HTTP"
	@echo "make chat                                   set everything up and chat in the terminal"
	@echo "make test                                   set everything up and run the quick tests"
	@echo "make test-all                               ... and the slow ones"
	@echo "make setup                                  environment, packages and model only"
	@echo "PYTHON=python3.12 picks an interpreter; TORCH=cpu or cuda a build of torch, whatever GPU there is;"
	@echo "PIP_ARGS=... adds words for pip, such as --index-url of a mirror"

setup: $(VENV)/.installed
	@$(BIN)/quire pull $(MODEL)

serve: setup
	@exec $(BIN)/quire serve $(MODEL) --host $(HOST) --port $(PORT)

chat: setup
	@exec $(BIN)/quire run $(MODEL)

test: setup $(VENV)/.dev
	$(PYTEST) $(PARALLEL)

test-all: setup $(VENV)/.clients
	$(PYTEST) $(PARALLEL) -m "slow or not slow"

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; run make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch first, by itself: which build fits depends on the machine. What follows finds it there and keeps it.
$(VENV)/.torch: pyproject.toml scripts/install_torch.py | $(BIN)/pip
	@$(BIN)/python scripts/install_torch.py --build $(TORCH) -- $(PIP_ARGS)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.clients: $(VENV)/.dev
	$(PIP) -e '.[clients]'
	@touch $@
