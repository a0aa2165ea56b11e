# demo and test do all set-up in .venv; stamps make a second call quick and free of the network.
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/.demo
	$(BIN)/fenchel train

# One process per core and one thread per process: more threads would wait for each other.
test: .venv/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: .venv/.dev
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

bench: .venv/.dev
	$(BIN)/python -m benchmarks

# The site of the documentation, into site/; site/index.html opens without a server.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.venv/.demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

.venv/.docs: .venv/.demo
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

.PHONY: demo test lint kernels bench docs
