# Headstart: `make serve` answers on http://127.0.0.1:8000, `make test` shows that it works.
PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
# torch's CPU build: 0.2 GB where the registry's default build for Linux brings several GB of CUDA packages.
# `make setup TORCH_INDEX=` takes the default build; with an NVIDIA GPU that is what happens anyway.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Processes that run tests. Many tests wait: four processes keep two cores busy.
JOBS        ?= 4
ARGS        ?=

BIN  := $(VENV)/bin
RUN  := $(VENV)/.installed
DEV  := $(VENV)/.installed-dev
DIST := $(VENV)/.installed-dist
# pip's progress bars on a terminal.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)
# One compute thread per test process, and no spinning: processes share the cores instead of fighting for them.
QUIET_CORES := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0
# Written, bytecode is made once instead of by every process: half the time of collecting tests.
BYTECODE := PYTHONDONTWRITEBYTECODE=
# Forked from the process that has collected (tests/forked_workers.py); whole files, the longest first.
PYTEST := $(QUIET_CORES) $(BYTECODE) $(BIN)/python -m pytest --forks $(JOBS)
LINT   := $(BIN)/ruff format --check . && $(BIN)/ruff check .
TYPES  := $(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none
# Of all code, also where types are not checked, the names; what was known not to exist is in a list.
NAMES  := $(TYPES) --config tests/pyrefly.toml --baseline tests/known_names.json
SELF   := $(MAKE) --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help setup install serve test check tests test-lab test-long test-gpu format bench docs site dist sbom clean

help:           ## this list
	@awk -F ':|## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, substr($$0, index($$0, "## ") + 3) }' $(MAKEFILE_LIST)

serve: install  ## install what is missing and serve: make serve [MODEL=Qwen/Qwen3-0.6B] [ARGS="--port 9000"]
	@HEADSTART_INTERRUPT_CODE=0 exec $(BIN)/headstart serve $(MODEL) $(ARGS)

install: $(RUN) ## .venv with what serving needs
setup: $(DEV)   ## .venv with what serving, testing and plotting need

# Kernels are compiled beside the installation and types checked beside the tests; both end before this target does.
# What pip installs is compiled to bytecode when it is imported: most of it never is (for pip, `no` is --no-compile).
test:           ## all of it: setup, check and the test suite
	@nice $(PYTHON) tests/build_kernels.py & kernels=$$!; trap "kill $$kernels" INT TERM; \
	PIP_NO_COMPILE=no $(SELF) setup && wait $$kernels
	$(LINT)
	@echo '$(TYPES) &'; { $(TYPES) && $(NAMES); } >$(VENV)/types.log 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	$(SELF) tests; tested=$$?; \
	wait $$types || { cat $(VENV)/types.log; exit 1; }; exit $$tested

tests: $(DEV)   ## the test suite alone: make tests [ARGS="tests/core -k prefix"]
	$(PYTEST) --max-file-seconds 150 --examples 0.4 $(ARGS)

test-lab: $(DEV) ## the tests of lab/ alone: make test-lab [ARGS="-k fleet"]
	$(PYTEST) $(ARGS) lab/tests

check: $(DEV)   ## format, lint and types, changing nothing
	$(LINT)
	$(TYPES)
	$(NAMES)

format: $(DEV)  ## format and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-long: $(DEV) ## the minutes-long tests: all examples of properties, the whole oracle, fuzzing, planted bugs, a published checkpoint, clients (needs PyPI and npm once)
	$(PYTEST) -m "(long or hypothesis) and not gpu" --timeout 3600 $(ARGS)

test-gpu: $(DEV) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu --timeout 600 $(ARGS)

bench: $(DEV)   ## four workloads, in this process or against a server: make bench [ARGS="--against URL"]
	$(BIN)/headstart bench rotations $(ARGS)
	$(BIN)/headstart bench intent $(ARGS)
	$(BIN)/headstart bench shared-prefix $(ARGS)
	$(BIN)/headstart bench decode $(ARGS)

docs: $(DEV)    ## write the generated tables in docs/
	$(BIN)/python docs/generate.py

site: $(DEV)    ## the documentation as a site, in site/; links checked
	$(BIN)/python docs/site.py

# libgomp is torch's own: a second one in the wheel would start a second set of threads.
dist: $(DIST)   ## sdist and manylinux wheel with compiled kernels and scheduler, checked, in dist/
	rm -rf dist build
	HEADSTART_CORE=compiled $(BIN)/python -m build --outdir build/raw .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/raw/*.whl
	mv build/raw/*.tar.gz dist/
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz

sbom: dist      ## CycloneDX lists of what the wheel brings along, without and with its engine, in dist/
	for extra in router engine; do \
	  $(PYTHON) -m venv build/$$extra && if [ $$extra = engine ]; then build/$$extra/bin/pip install $(QUIET) "$(TORCH)"; fi \
	  && build/$$extra/bin/pip install $(QUIET) "$$(echo dist/*.whl)[$$([ $$extra = engine ] && echo engine || echo kubernetes,picker)]" \
	  && $(BIN)/cyclonedx-py environment build/$$extra/bin/python --output-file dist/$$extra.cdx.json || exit 1; \
	done

clean:          ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find src lab plugins tests benchmarks examples training -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: Headstart needs 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that nothing below decides which build it is: a wheel that pip's own find-links offers,
# else the CPU index if it answers, else the registry.
define INSTALL_TORCH
@echo "== torch ($(TORCH))"
@if $(BIN)/pip install --quiet --no-index --no-deps "$(TORCH)" 2>/dev/null; then :; \
elif [ "$$(uname -s)" = Linux ] && [ -n "$(TORCH_INDEX)" ] && ! command -v nvidia-smi >/dev/null \
  && $(BIN)/python -c 'import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1] + "/torch/", method="HEAD"), timeout=3)' "$(TORCH_INDEX)" 2>/dev/null; then \
  $(BIN)/pip install --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)"; \
else \
  if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
    echo "== no CPU build of torch ($(if $(TORCH_INDEX),$(TORCH_INDEX) does not answer,TORCH_INDEX is empty)): the registry's default build"; \
    echo "   brings CUDA packages, 0.5 GB to several GB, which this machine has no use for; for another index: make TORCH_INDEX=URL"; \
  fi; \
  $(BIN)/pip install "$(TORCH)"; fi
endef

# With uv, which takes a third of pip's time, from pip's index; where it fails, pip installs, or says why it cannot.
INSTALL = { $(BIN)/pip install --quiet uv && UV_SYSTEM_CERTS=1 \
  UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null)}}" \
  $(BIN)/uv pip install $(QUIET) --python $(BIN)/python $(1); } || $(BIN)/pip install $(QUIET) $(1)

$(RUN): pyproject.toml | $(BIN)/python
	$(INSTALL_TORCH)
	@echo "== headstart"
	@$(call INSTALL,-e '.[engine]')
	@touch $@

$(DEV): pyproject.toml lab/pyproject.toml plugins/pyproject.toml | $(BIN)/python
	$(INSTALL_TORCH)
	@echo "== headstart and tools for tests, checks and plots"
	@$(call INSTALL,-e '.[dev]')
	$(BIN)/pip install $(QUIET) --no-index --no-deps --no-build-isolation -e lab -e plugins
	@touch $(RUN) $@

$(DIST): pyproject.toml | $(BIN)/python
	@echo "== tools for packages"
	@$(call INSTALL,-e '.[dist]')
	@touch $@
