# Everything sets itself up: a virtual environment in .venv from the pinned requirements.lock; what only some targets need comes
# on top, from the other locks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
DOCS := $(VENV)/.docs
INTEGRATIONS := $(VENV)/.integrations
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# One line that names each package as it comes, instead of minutes of silence.
# Into a file only the last line: the others are rewritten by control codes.
PROGRESS := { test -t 1 && shown=yes; awk -v shown="$$shown" '/^Collecting/ { n++ } \
	shown && /^Collecting/ { printf "\r\033[K  %d packages, now %s", n, $$2; fflush() } \
	shown && /^Installing/ { printf "\r\033[K" } /^Installing/ { print "  installing " n " packages"; fflush() }'; }

.PHONY: help train test test-all test-slow test-docker test-wheel release check format hooks proto dashboards settings docs wheel bench paper chaos soak fuzz clean
help:
	@echo "make train   train the embedded digits with a server, AdamW on it, and 4 workers (ARGS='--workers 8 ...' for more)"
	@echo "make test    run the tests that protect a change (3 minutes)"
	@echo "make test-all   run these and the long ones: whole runs of processes, many seeds, examples, trainers, trackers, Ray, the Helm chart; with the share of lines that they run"
	@echo "make check   lint, types (of the tests too), generated code in step"
	@echo "make test-slow   the tests that need minutes or the real MNIST"
	@echo "make test-docker   the same cluster in containers: training, crashes, scaling, the chart's pods (needs Docker; about 5 minutes)"
	@echo "make test-wheel   build the wheel, install it into an empty environment and run its commands"
	@echo "make release   wheel, sdist, chart, images and their bills of materials in dist/, each tried in an empty place (needs Docker)"
	@echo "make format  format the code"
	@echo "make hooks   install git hooks that lint each commit and check its generated code"
	@echo "make docs   the documentation as a site with search, in build/site"
	@echo "make wheel   build the wheel, in dist/"
	@echo "make bench   round trips per second beside other parameter servers, then many sessions (ARGS=--quick for a rough figure)"
	@echo "make paper   the paper's figures from MNIST's four files in DATA=DIR (hours); ARGS=--quick for a rough look (12 minutes)"
	@echo "make chaos   kill servers and workers 100 times each, then two servers of one model, fill a disk, and look for what was lost (15 minutes)"
	@echo "make soak    a million small commits from workers that come and go, then MINUTES=10 of the simulation"
	@echo "make fuzz    coverage-guided fuzzing of what reads frames, log and checkpoints, SECONDS=60 each (Linux, Python up to 3.13)"
	@echo "make dashboards   generate Grafana's dashboards and the Helm chart's alerts"
	@echo "make settings   write the commands' settings into docs/settings.md and the Helm chart"
	@echo "make proto   generate the Python code of the contract"

$(READY): requirements.lock pyproject.toml
	@echo "setting up $(VENV) (once; it downloads the pinned packages and takes some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --progress-bar off --disable-pip-version-check -r requirements.lock | $(PROGRESS)
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@echo "compiling the server's update rules (once)"
	@$(BIN)/python -m gem_server.warm_up
	@touch $@

ADD = $(BIN)/pip install --progress-bar off --disable-pip-version-check --no-deps -r

$(DEV): requirements-dev.lock $(READY)
	@echo "adding what tests, linters and benchmarks need to $(VENV) (once)"
	@$(ADD) $< | $(PROGRESS)
	@touch $@

$(DOCS): requirements-docs.lock $(READY)
	@echo "adding what the documentation site needs to $(VENV) (once)"
	@$(ADD) $< | $(PROGRESS)
	@touch $@

$(INTEGRATIONS): requirements-integrations.lock $(DEV) $(DOCS)
	@echo "adding Lightning, Transformers, JAX, Keras and experiment trackers to $(VENV) (once)"
	@$(ADD) $< | $(PROGRESS)
	@touch $@

# Of the four workers one is slow: that is simulated. Ctrl-C is no error: gem-train has saved the run by then.
train: $(READY)
	@GEM_STEP_SECONDS="$${GEM_STEP_SECONDS-0.1,0.1,0.1,0.5}" $(BIN)/gem-train --optimizer adamw $(ARGS) || test $$? = 130

# Tests start hundreds of processes, each of which would compile the project's code anew.
test test-all test-slow test-docker test-wheel release: export PYTHONDONTWRITEBYTECODE =

# The tests that have no target of their own.
ALL := not slow and not docker and not wheel and not release

test: $(DEV)
	@$(BIN)/pytest -m "$(ALL) and not long" --ignore=tests/integrations --ignore=tests/engines --ignore=tests/release $(ARGS)

# Fails if the tests run fewer lines than the floor in pyproject.toml. A part of the tests stays below it:
# ARGS="tests/core --cov-fail-under=0".
test-all: $(INTEGRATIONS)
	@$(BIN)/pytest -m "$(ALL)" --cov --cov-report=term-missing:skip-covered $(ARGS)

test-slow: $(INTEGRATIONS)
	@$(BIN)/pytest -m slow -n 0 $(ARGS)

test-docker: $(INTEGRATIONS)
	@docker compose version >/dev/null || { echo "Docker with the compose plug-in is needed"; exit 1; }
	@$(BIN)/pytest -m docker -n 3 -vv $(or $(ARGS),tests/engines tests/containers)

test-wheel: wheel $(DEV)
	@$(BIN)/pytest -m wheel -n 0 tests/house $(ARGS)

# The checksums come last: they stand for files that passed.
release: $(INTEGRATIONS)
	@$(BIN)/python deploy/release/build.py
	@$(BIN)/pytest -m "wheel or release" -n 0 tests/house tests/release
	@cd dist && sums=$$(sha256sum *) && echo "$$sums" | tee SHA256SUMS

check: $(DEV)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy proto server worker client_sdk tests benchmarks examples
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python deploy/grafana/generate.py --check
	@$(BIN)/python deploy/helm/generate.py --check
	@$(BIN)/python docs/generate.py --check

# Without them a commit is checked by `make check` alone.
hooks: $(DEV)
	@$(BIN)/pre-commit install

docs: $(DOCS)
	@$(BIN)/sphinx-build -q -W --keep-going -b html -c docs . build/site
	@echo "open build/site/index.html"

# From a fresh folder: setuptools would take along what an older build left there.
wheel: $(READY)
	@rm -rf build/lib build/bdist.* dist
	@$(BIN)/pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(DEV)
	@$(BIN)/python proto/generate.py

dashboards: $(DEV)
	@$(BIN)/python deploy/grafana/generate.py

bench: $(DEV)
	@$(BIN)/python -m benchmarks.peers $(ARGS)
	@$(BIN)/python -m benchmarks.server.sessions $(filter --quick,$(ARGS))

settings: $(DEV)
	@$(BIN)/python docs/generate.py
	@$(BIN)/python deploy/helm/generate.py

DATA ?=
paper: $(DEV)
	@$(BIN)/python -m benchmarks.paper $(if $(DATA),--data "$(DATA)") $(ARGS)

chaos: $(DEV)
	@PYTHONPATH=tests $(BIN)/python -m chaos.run $(ARGS)

MINUTES ?= 10
soak: $(DEV)
	@$(BIN)/python -m benchmarks.server.soak $(ARGS)
	@cd tests && ../$(BIN)/python -m simulation.soak --minutes $(MINUTES)

# Apart from requirements.lock: it is made for few systems, and nothing else needs it.
SECONDS ?= 60
TARGETS ?= frame segment log state model workers
fuzz: $(DEV)
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps -r requirements-fuzz.lock
	@cd tests && for target in $(TARGETS); do ../$(BIN)/python -m fuzz.run $$target $(SECONDS) || exit 1; done

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
