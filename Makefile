# Every target sets itself up: a machine needs Python 3.11 or 3.12, make and git. Each release of
# SGLang has an environment of its own: make VENV=.venv-next SGLANG=0.5.23 demo test
FITS := import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for python in python3.12 python3.11 python3; do \
  $$python -c '$(FITS)' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
SGLANG ?= 0.5.13.post1
LOCK := $(if $(filter 0.5.13.post1,$(SGLANG)),requirements.lock,requirements-$(SGLANG).lock)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PORT ?= 30000
# Where this is set, every process compiles all of SGLang anew: half of a server's start.
export PYTHONDONTWRITEBYTECODE :=
# The theme would announce its successor at every build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo watch serve test test-fast test-ci test-full chaos check style hooks docs docs-serve lock bench load-tools results clean

demo: $(READY)  ## both servers, 8 prompts, a table
	$(BIN)/sglang-dflash demo

watch: $(READY)  ## a page on 127.0.0.1:$(PORT) shows the pair's blocks, with and without DFLASH
	$(BIN)/sglang-dflash watch --port $(PORT)

serve: $(READY)  ## the bundled pair on 127.0.0.1:$(PORT)
	$(BIN)/sglang-dflash serve --port $(PORT) $(FLAGS)

PARALLEL := --numprocesses 3 --dist loadscope --no-loadscope-reorder --durations 15
test: $(READY)  ## the real SGLang; the larger set of CI is test-ci
	$(BIN)/python -m pytest test -m "not full and not ci" $(PARALLEL)

test-fast: $(READY)  ## what needs no SGLang, in a minute
	$(BIN)/python -m pytest test/unit test/benchmark -m "not full and not ci and not sglang" $(PARALLEL)

test-ci: $(READY)  ## the CI set: also the controls and the rarer combinations
	$(BIN)/python -m pytest test -m "not full" $(PARALLEL)

test-full: $(READY)  ## all combinations, by hand; continues from a test that failed
	$(BIN)/python -m pytest test --stepwise

chaos: $(READY)  ## MINUTES=3 of failing clients, stalls and retractions, then the ends of a server
	$(BIN)/python -m test.chaos --minutes $(or $(MINUTES),3)

check: $(READY)  ## formatter, linter, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

style: $(READY)  ## let the formatter and the linter correct what they can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(READY)  ## make check before each commit
	$(BIN)/pre-commit install

docs: $(READY)  ## the site, into build/site
	$(BIN)/mkdocs build --strict

docs-serve: $(READY)  ## the site on 127.0.0.1:8000, built anew when a page changes
	$(BIN)/mkdocs serve

bench: $(READY)  ## the sweep in 5 minutes, its table last
	rm -f build/bench.json
	$(BIN)/python -m benchmark.sweep --mix --prompts 11 --per-slot 9 --concurrency 1,8,32 \
	  --max-tokens 96 --repeats 2 \
	  --threads $(or $(THREADS),1) --out build/bench.json

load-tools: $(READY)  ## other load tools against one server; they are installed apart
	$(BIN)/python -m benchmark.load_tools

results: $(READY)  ## the full sweep on this machine and its plots; continues where it stopped
	PYTHON=$(BIN)/python benchmark/results.sh

lock: $(READY)  ## resolve the lock of SGLANG anew
	echo sglang==$(SGLANG) | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	  --no-header --no-annotate --extra dev --extra bench --extra docs pyproject.toml - \
	  --output-file $(LOCK)

$(READY): $(LOCK) pyproject.toml
	@$(or $(PYTHON),false) -c '$(FITS)' || { echo 'Python 3.11 or 3.12 is needed: make PYTHON=...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --requirement $(LOCK)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --no-deps --editable . \
	  --editable benchmark/builtin_cpu
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
