# demo and test do all set-up in .venv; the stamps make a second call quick and need no network.
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/.demo
	$(BIN)/fenchel train --out runs/demo --overwrite

test: .venv/.dev lint
	$(BIN)/pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: .venv/.dev
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

bench: .venv/.dev
	$(BIN)/python -m benchmarks

.venv/.demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[text]'
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

.PHONY: demo test lint kernels bench
