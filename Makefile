# make study   sets everything up, measures this machine, prints where the report lies
# make test    sets everything up, checks style, types and contracts, runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/study

.PHONY: study test lint types types-of-package types-of-benchmarks contracts check clean

study: $(VENV)/.ready
	$(BIN)/stepgauge study --out $(OUT)

# Two files at a time: half of the tests have one process, the others start ranks. Files stay in their order, in
# which the longest are not the last. Many tests start processes, which would all compile the package where
# PYTHONDONTWRITEBYTECODE is set.
test: lint types contracts
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: lint types contracts

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev  # both at once: each has one process
	$(MAKE) -j 2 types-of-package types-of-benchmarks

types-of-package: $(VENV)/.ready-dev
	$(BIN)/mypy

types-of-benchmarks: $(VENV)/.ready-dev
	$(BIN)/mypy --config-file benchmarks/mypy.ini

contracts: $(VENV)/.ready-dev
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "stepgauge needs Python 3.11 to 3.13; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(VENV)/.ready $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
