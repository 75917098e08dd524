PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup browser test test-fast test-all check demo bench results docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "prototree needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 setup"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/mypy

# Pages are tested in a real browser. Where there is none and it cannot be installed, those tests skip with a reason.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } \
		|| echo "Chromium is missing and could not be installed; the tests of pages will be skipped"

# Each file of tests in one process, so that what its tests share is made once; in the order of tests/conftest.py. One process
# more than there are cores, because tests of pages, servers and killed runs mostly wait.
PROCESSES = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
SPREAD = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: check browser
	$(BIN)/python -m pytest -q $(SPREAD) -m "not slow"

# For the daily loop: everything that is quick by itself, without browsers, servers and whole trainings.
test-fast: setup
	$(BIN)/python -m pytest -q $(SPREAD) -m "not slow and not long"

test-all: check browser
	$(BIN)/python -m pytest -q $(SPREAD)

bench: setup
	$(BIN)/python benchmarks/bench_inference.py
	$(BIN)/python benchmarks/bench_tree.py
	$(BIN)/python benchmarks/bench_train.py
	$(BIN)/python benchmarks/bench_data.py
	$(BIN)/python benchmarks/bench_stages.py
	$(BIN)/python benchmarks/bench_explain.py
	$(BIN)/python benchmarks/bench_export.py
	$(BIN)/python benchmarks/bench_predict.py

# Every figure of README and documentation, in hours: make results CUB=CUB_200_2011 WEIGHTS=mobilenetv2_100_inat_birds.safetensors
# Experiments that are finished are not made again; without CUB or WEIGHTS, those that need them are left out.
results: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/results.py run $(if $(CUB),--cub $(CUB)) $(if $(WEIGHTS),--birds-weights $(WEIGHTS))
	$(BIN)/python benchmarks/results.py collect
	$(BIN)/python benchmarks/results.py write

# Pictures of pages are those of the demo tree; where there is no browser they stay as they are.
docs: setup browser runs/demo/results.md
	@! command -v chromium >/dev/null || $(BIN)/python benchmarks/screenshots.py runs/demo docs
	$(BIN)/mkdocs build --strict
	@echo "read it at http://localhost:8001 with: python3 -m http.server 8001 --bind localhost --directory site"

runs/demo/results.md: | setup
	$(BIN)/prototree train birds --preset demo --out runs/demo --overwrite

demo: setup
	$(BIN)/prototree train birds --preset demo --out runs/demo --overwrite
	$(BIN)/prototree report runs/demo

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
