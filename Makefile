# A handful of verbs. Each does all of the set-up it needs, inside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/.matplotlib

.PHONY: demo test lint types check bench docs clean

demo: $(READY)
	$(BIN)/gepc demo --out demo

test: $(READY)
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

check: lint types test

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# strict: a warning is an error, and the code blocks of the pages are run
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) demo docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# torch first and by its exact version: a looser request may bring gigabytes of GPU libraries
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	touch $(READY)
