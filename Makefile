# A handful of verbs. Each does all of the set-up it needs, inside this folder.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/.matplotlib

PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types check bench docs notebooks coverage mutants wheel oldest hostile clean

demo: $(DEMO_READY)
	$(BIN)/gepc demo --out demo

# each file on one worker, so that fixtures of a file are built once; in the order of the folders, so that large files
# with few tests do not come last
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(BIN)/python $(PYTEST) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini

check: lint types test

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# strict: a warning is an error, the code blocks of the pages are run, and the pages are looked at in a browser if there is one
docs: $(READY)
	$(BIN)/python $(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python docs/figures.py --check
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python -m pytest tests/test_docs_pages.py
	@echo "docs/_build/html/index.html"

# run the notebooks of the documentation; they must give what is stored in them
notebooks: $(READY)
	$(BIN)/python $(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python docs/notebooks/run.py --check

# branches of the core that the tests take; fails below 95 %
coverage: $(READY)
	$(BIN)/python $(PYTEST) --cov --cov-report= $(ARGS)
	$(BIN)/python -m coverage report | tee coverage.txt
	$(BIN)/python -m coverage report --fail-under=95 >/dev/null

# change the core one operator at a time: do the tests notice? A fixed sample; ARGS=--all for every change
mutants: $(READY)
	$(BIN)/python benchmarks/mutants.py $(ARGS)

# the wheel, installed in a clean environment
wheel:
	rm -rf dist build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python $(PIP) --constraint $(CONSTRAINTS) build torch
	build/wheel/bin/python -m build --outdir dist .
	build/wheel/bin/python $(PIP) --constraint $(CONSTRAINTS) dist/*.whl
	cd build && wheel/bin/gepc --version && wheel/bin/gepc selfcheck

# a part of the tests with the oldest versions that pyproject.toml allows; OLDEST=torch=2.13.0 takes another one
OLDEST_TESTS := tests/core tests/images tests/calibration tests/conformal tests/detector tests/maps tests/methods tests/cli \
	tests/runs tests/scenes tests/serve tests/test_pinned.py
oldest:
	rm -rf build/oldest
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python tests/oldest.py $(OLDEST) > build/oldest.txt
	build/oldest/bin/python $(PIP) --constraint build/oldest.txt torch numpy
	build/oldest/bin/python $(PIP) --constraint build/oldest.txt --editable '.[all,onnx]' hypothesis httpx2 pytest pytest-xdist
	build/oldest/bin/python $(PYTEST) $(or $(ARGS),$(OLDEST_TESTS))

# damaged files, fuzzed requests and killed processes in large numbers; ARGS="--scale 0.02" for a few minutes
hostile: $(READY)
	$(BIN)/python -W ignore benchmarks/hostile.py $(ARGS)

clean:
	rm -rf $(VENV) demo docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist .coverage coverage.txt

# what the demo needs; torch first and by its exact version: a looser request may bring gigabytes of GPU libraries
$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint $(CONSTRAINTS) torch
	$(BIN)/python $(PIP) --constraint $(CONSTRAINTS) --editable '.[demo]'
	touch $@

# and the tools of development
$(READY): $(DEMO_READY)
	$(BIN)/python $(PIP) --constraint $(CONSTRAINTS) --editable '.[all,dev]'
	touch $@
