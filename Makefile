# `make gate` and `make test` are all one needs: each creates .venv, installs, and runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: gate test lint types mutants clean

gate: $(INSTALLED)  ## the embedded catalogue and the embedded trace
	$(BIN)/cpkv gate

test: $(INSTALLED)  ## all tests, on all cores
	$(BIN)/pytest -n auto

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy
	$(BIN)/mypy benchmarks examples

mutants: $(INSTALLED)  ## every wrong version must be caught
	$(BIN)/cpkv mutants

clean:
	rm -rf $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@
