# Few, short, the same on a laptop and in CI.
#   make demo    install what it takes, then adapt, export, index, serve and ask (ARGS=--no-serve stops after the answers)
#   make test    install everything, check, then run the whole suite
#   make check   lint, format, types        make fix     let ruff mend what it can        make bench   the benchmarks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=

.PHONY: demo test check fix bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[cpu,train,world]"
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[cpu,train,roles,world,test,dev]"
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/dear-serve demo $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

fix: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
