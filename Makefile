# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. They run in .venv, which the first one that needs it creates.

PYTHON3 ?= python3
VENV ?= .venv
PYTHON := $(VENV)/bin/python
PYTEST_ARGS ?=
# More than there are cores: tests wait for servers, engines that start, and deadlines.
WORKERS ?= 4
# Without compiled files every process of vLLM compiles what it imports: 35 s a start, not 13.
unexport PYTHONDONTWRITEBYTECODE
IN_PARALLEL := -n $(WORKERS) --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup setup-quick servers demo demo-fleet test test-quick test-ceph test-wheels test-vllm bench bench-tiers bench-fleet docs lint format clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

setup:  ## Make .venv with vLLM's CPU build (about 2 minutes the first time)
	@$(PYTHON3) scripts/setup-venv --venv $(VENV)

setup-quick:  ## Make .venv with KVHaven and the tools only (seconds)
	@$(PYTHON3) scripts/setup-venv --venv $(VENV) --without-vllm

servers:  ## Install Debian's packages of the servers that tests need, where this is root and has apt
	@$(PYTHON3) scripts/setup-venv --venv $(VENV) --without-vllm --servers

demo: setup  ## Show vLLM loading the KV of repeated prompts, from memory and from disk
	@$(PYTHON) examples/demo/main.py

test: setup servers  ## Run all tests, quick ones first, then those with real vLLM
	@$(PYTHON) -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

test-quick: setup-quick servers  ## Run the tests that need no vLLM and are fast
	@$(PYTHON) -m pytest $(IN_PARALLEL) -m "not vllm and not slow and not crash" $(PYTEST_ARGS)

test-ceph: setup-quick  ## Run the tests of the S3 tier against a real Ceph (installs its packages)
	@scripts/with-ceph $(PYTHON) -m pytest tests/conformance tests/unit/test_s3_tier.py \
		-k "s3 and tier" $(PYTEST_ARGS)

test-wheels: setup-quick  ## Install KVHaven's wheel into a bare Python 3.11, 3.12, 3.13 and 3.14
	@KVHAVEN_EVENTS=1 $(PYTHON) -m pytest tests/unit/test_wheels.py $(PYTEST_ARGS)

demo-fleet: setup  ## Show a prefill node and a different decode node behind the router
	@$(PYTHON) examples/fleet/main.py

test-vllm:  ## Test the connector with another vLLM: make test-vllm VERSION=0.30.0 (in .venv-vllm-0.30.0)
	@$(PYTHON3) scripts/setup-venv --venv .venv-vllm-$(VERSION) --vllm $(VERSION)
	@.venv-vllm-$(VERSION)/bin/python scripts/test_vllm.py --version $(VERSION) $(ARGS)

bench: setup servers  ## Measure, and compare with the limits of this machine
	@$(PYTHON) -m benchmarks

bench-tiers: setup servers  ## Measure disk, shared directory, S3 and Redis, and time to first token from each
	@$(PYTHON) -m benchmarks tiers

bench-fleet: setup  ## Measure several nodes: transfers, the router, tails, prefill and decode apart
	@$(PYTHON) -m benchmarks fleet nixl route affinity tails announce apart

docs:  ## Build the documentation site in build/site; a warning or a broken link fails
	@$(PYTHON3) scripts/setup-venv --venv .venv-docs --docs
	@mkdir -p build
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=src .venv-docs/bin/python -m mkdocs build --strict \
		> build/docs.log 2>&1 || (cat build/docs.log; exit 1)
	@echo "docs: build/site/index.html"

lint: setup  ## Check style, format and types
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

format: setup-quick  ## Format the sources, and apply the linter's safe fixes
	@$(PYTHON) -m ruff check --fix-only .
	@$(PYTHON) -m ruff format .

clean:  ## Remove what tests, benchmarks and builds left (.venv stays)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
