# demo and test do all set-up in .venv; stamps make a second call quick and free of the network.
# make test TORCH=2.15.0 tests another version of torch, in an environment of its own.
PYTHON ?= python3
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
# Triton 3.6, which torch 2.11 needs, interprets kernels with NumPy before 2.4 only.
PINS := 'torch==$(or $(TORCH),2.13.*)' $(if $(filter 2.11%,$(TORCH)),'numpy<2.4')

demo: $(VENV)/.demo
	$(BIN)/fenchel train

# One thread per process: more threads would wait for each other. Half again as many processes as cores,
# since tests of servers, browsers and timeouts wait. A process that is done takes tests from another:
# the lessons are minutes in one piece.
# Lint and types are those of the usual torch.
WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() * 3 // 2)")
test: $(VENV)/.dev $(if $(TORCH),,lint)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(VENV)/.dev
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

fuzz: $(VENV)/.dev
	for name in bounds faults hostile_directories hostile_requests; do $(BIN)/python -m tests.fuzz.$$name || exit 1; done

# The site of the documentation, into site/; site/index.html opens without a server.
# make docs COURSE=1 puts the web edition of the lessons inside, which takes minutes.
docs: $(VENV)/.docs $(if $(COURSE),$(VENV)/.learn)
	COURSE=$(COURSE) $(BIN)/python docs/site.py build/site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs build/site site
	$(if $(COURSE),rm -rf site/course && $(BIN)/fenchel learn --freeze site/course)
	@echo "Open site/index.html in a browser."

# The same with the site of every release in a folder of its version, as docs.yml publishes it.
RELEASES = $(shell git tag --list 'v*' | sed 's/^v//')
site:
	RELEASES="$(RELEASES)" $(MAKE) docs
	for version in $(RELEASES); do \
		rm -rf build/release && git worktree prune && git worktree add --detach build/release v$$version && \
		RELEASES= $(MAKE) -C build/release docs && rm -rf site/$$version && mv build/release/site site/$$version && \
		git worktree remove --force build/release || exit 1; \
	done

# The pictures of the gallery, by the commands that docs/pictures.py lists, in Chromium.
pictures: $(VENV)/.dev
	$(BIN)/python -m docs.pictures

# Wheel and sdist, into dist/: built, checked, installed into a new environment and used there.
dist: $(VENV)/.dist
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.wheel dist

# The web edition of the lessons, into course/; course/index.html opens without a server.
course: $(VENV)/.learn
	$(BIN)/fenchel learn --freeze course

# The model that the lessons come with: 1,500 steps of the default run, about four minutes on one core.
lesson-model: $(VENV)/.demo
	$(BIN)/fenchel train --steps 1500 --set train.threads=1 --out runs/lesson-model
	$(BIN)/fenchel convert runs/lesson-model fenchel/lessons/model --dtype float16 --force

$(VENV)/.demo: pyproject.toml
	@echo "Installing fenchel and torch into $(VENV), once: minutes, and 1.2 GB or with CUDA 5.8 GB on disk."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable . $(PINS)
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install --quiet --editable '.[dev]' $(PINS)
	touch $@

$(VENV)/.dist: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet build twine
	touch $@

$(VENV)/.learn: $(VENV)/.demo
	@echo "Installing what the lessons need into $(VENV), once."
	$(BIN)/pip install --quiet --editable '.[learn]' $(PINS)
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "Installing the tools of the documentation into $(VENV), once."
	$(BIN)/pip install --quiet --editable '.[docs]' $(PINS)
	touch $@

.PHONY: demo test lint kernels bench fuzz docs site pictures dist course lesson-model
