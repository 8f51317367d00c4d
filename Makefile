# The first two commands do all the set-up on a fresh machine with Python >= 3.11: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCHMARKS := $(filter-out benchmarks/side_by_side.py,$(wildcard benchmarks/*.py))

# tests start hundreds of processes, each of which would compile the package again
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-long lint bench docs gallery clean

demo: $(VENV)/.installed  ## a night staged and a cohort of claims scored, both made up
	$(BIN)/bitimely demo

test: $(VENV)/.tested  ## the suite, offline, CPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not slow and not long"

test-slow: $(VENV)/.tested  ## whole workflows, tutorials and the gallery, kills of a job array
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu and not long"

test-long: $(VENV)/.tested  ## every point of the sweeps of kills, inputs and pairs of processes
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.tested  ## style, types, who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.tested  ## ratios measured side by side, see benchmarks/README.md; QUICK=--quick: whether all run
	missed=0; for script in $(BENCHMARKS); do $(BIN)/python $$script $(QUICK) || missed=1; done; exit $$missed

docs: $(VENV)/.documented  ## the site, into build/site; no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gallery: $(VENV)/.documented  ## the site with the figures of docs/gallery, whose scripts take a minute
	GALLERY=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,docs,spark,s3,track,onnx,triton]"
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
