# The commands of the project. Everything runs from .venv, which the first of them makes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JSON   ?=
ARGS   ?=
WORKERS ?= 2

# The shipped policy's recipe; its README says what the figures are for.
POLICY         ?= envfarm/inference/policies/stockroom
EXPERT_COUNT   ?= 22400
EXPERT_STEPS   ?= 1400
CARELESS_COUNT ?= 1920
CARELESS_STEPS ?= 120

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo test check format protos policy bench images base-image wheels pins clean

# Images: what they stand on (empty: the Dockerfile's default), and their tag.
BASE_IMAGE ?=
TAG        ?= latest

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "envfarm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.local: pyproject.toml constraints.txt | $(BIN)/python
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.local

install: $(VENV)/.local  ## Make .venv with everything a farm on this machine needs

install-dev: $(VENV)/.dev  ## Make .venv with what development needs as well

demo: $(VENV)/.local  ## Train a small tool-using policy through every part of the farm (ARGS='--seconds 60')
	$(BIN)/envfarm demo $(ARGS)

test: $(VENV)/.dev  ## Run the tests (ARGS='-m containment' runs a part)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

check: $(VENV)/.dev  ## ruff, types, import contracts, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python protos/generate.py --lint --check

format: $(VENV)/.dev  ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(VENV)/.dev  ## Regenerate envfarm/wire/v1 from protos/
	$(BIN)/python protos/generate.py

policy: $(VENV)/.local  ## Make the shipped starting policy anew (five minutes; POLICY=FOLDER writes elsewhere)
	@set -eu; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	demonstrations="$(BIN)/python -m sandboxes.environments.stockroom.demonstrations"; \
	set -x; \
	$$demonstrations --count $(EXPERT_COUNT) --seed 0 > $$work/clean.jsonl; \
	$$demonstrations --count $(CARELESS_COUNT) --seed 1 --skip 0.55 --slip 0.06 --mistake 0.02 > $$work/flawed.jsonl; \
	$(BIN)/envfarm warmup $$work/clean.jsonl --out $$work/skilled --steps $(EXPERT_STEPS) --learning-rate 2e-3 \
	    --seed 0 --threads 1; \
	$(BIN)/envfarm warmup $$work/flawed.jsonl --policy $$work/skilled --out $$work/policy --steps $(CARELESS_STEPS) \
	    --learning-rate 1e-3 --no-by-length --seed 2 --threads 1; \
	mkdir -p $(POLICY); cp $$work/policy/* $(POLICY)/

bench: $(VENV)/.dev  ## Measure speed beside ceilings in one run (JSON=FILE writes the figures)
	$(BIN)/python -m benchmarks $(if $(JSON),--json $(JSON)) $(ARGS)

images:  ## Build the images envfarm-{gateway,host,worker,trainer} (BASE_IMAGE=..., TAG=...)
	BASE_IMAGE=$(BASE_IMAGE) TAG=$(TAG) sandboxes/images/build gateway host worker trainer

base-image:  ## Make the base image debian-python:bookworm with debootstrap, where no registry can be reached (root)
	sandboxes/images/base debian-python:bookworm

wheels: $(BIN)/python  ## Fetch the images' packages here, where containers reach no package index (Python 3.11)
	PYTHON=$(BIN)/python sandboxes/images/wheels

pins: $(BIN)/python  ## Pin the images' packages anew (Python 3.11)
	PYTHON=$(BIN)/python sandboxes/images/pin

clean:  ## Remove what the other commands made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .envfarm protos/.deps
