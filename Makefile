# Everything sets itself up: the first `make` of any target builds what it needs from the locks.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Packages newer than this day are not looked at, so that `make lock` gives the same bytes each time.
LOCK_DATE := 2026-12-01T00:00:00Z
# CUDA=12.8 is for hosts whose driver is older than 580 (570 or newer): another torch, another base, the same code.
export CUDA ?= 13.0
ifeq ($(CUDA),12.8)
LOCK := requirements/cuda12.8.lock
VENV := .venv-cuda12.8
BASE_IMAGE ?= nvidia/cuda:12.8.1-base-ubuntu24.04@sha256:133c78a0575303be34164d0b90137a042172bdf60696af01a3c424ab402d86e2
else
LOCK := requirements.lock
VENV := .venv
BASE_IMAGE ?= nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1
endif
$(if $(filter 13.0 12.8,$(CUDA)),,$(error CUDA is "$(CUDA)": allowed: 13.0 | 12.8))
PYTHON := $(VENV)/bin/python
# uv where it is installed, else the locked one in a folder of its own.
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--exclude-newer $(LOCK_DATE)

export DOCKER ?= docker
export IMAGE ?= qlora-train:cuda$(CUDA)
export DOCKER_BUILDKIT := 1
# BuildKit 0.13 and newer dates the image by it. SOURCE: where the code is published. PACKAGE_INDEX: a mirror of the
# package index. CA_BUNDLE: certificates of a proxy on the way to it. BUILD_OPTIONS: further options of `docker build`.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
# Where train and check run: in the image where an engine answers, else in .venv. Given, it decides.
export RUNTIME ?= $(shell $(DOCKER) info >/dev/null 2>&1 && echo docker || echo venv)
export VENV

DEMO_MODEL := .cache/SmolLM2-135M-Instruct
DEMO_PROMPTS := --prompt "Why is the sky blue?" --prompt "What does the heart do?" --prompt "What is a library for?"

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(MAKEFILE_LIST))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | expand -t 17
setup: $(VENV)/.ready-dev ## build .venv from the locks

build: ## build the image (CUDA=12.8 for drivers older than 580)
	$(DOCKER) build $(BUILD_OPTIONS) $(if $(IMAGE),--tag $(IMAGE)) --build-arg CUDA=$(CUDA) --build-arg LOCK=$(LOCK) \
		--build-arg BASE_IMAGE=$(BASE_IMAGE) --build-arg BASE_DIGEST=$(filter sha256:%,$(subst @, ,$(BASE_IMAGE))) \
		--build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null) --build-arg SOURCE=$(SOURCE) \
		--build-arg VERSION=$(shell git describe --tags --always --dirty 2>/dev/null) \
		$(PACKAGE_INDEX:%=--build-arg PACKAGE_INDEX=%) $(CA_BUNDLE:%=--secret id=ca,src=%) .

train: ## fine-tune with the settings of .env and the environment
check: ## see whether machine, settings, data and model are fit (ARGUMENTS=--data: what would be learned)
shell: ## a shell in the image, as train would start it (our own image is brought up to date first)
shell: override RUNTIME := docker
train check shell: $(if $(filter venv,$(RUNTIME)),$(VENV)/.ready,$(if $(filter qlora-train:%,$(IMAGE)),build))
	docker/run.sh $@ $(if $(ENV_FILE),--env-file $(ENV_FILE)) $(ARGUMENTS)

demo: $(DEMO_MODEL)/config.json ## train a small model on the CPU, then compare its answers with the base's
	$(PYTHON) -m train train --env-file demo/demo.env
	$(PYTHON) -m train generate --env-file demo/demo.env --adapter outputs/demo/adapter --compare \
		--max-new-tokens 48 $(DEMO_PROMPTS)

test: $(DEMO_MODEL)/config.json ## run the tests
	$(PYTHON) -m pytest tests --ignore tests/image
test-gpu: ## run the tests on a GPU; fails where there is none
	REQUIRE_GPU=1 $(MAKE) test
test-image: build $(DEMO_MODEL)/config.json ## build the image and test it with a real engine
	$(PYTHON) -m pytest tests/image
reproduce-image: ## build the image twice from the last commit and compare the layers
	python3 docker/reproduce.py

fuzz: $(VENV)/.ready-dev ## feed the command line random settings and datasets for FUZZ_MINUTES (20)
	end=$$(($$(date +%s) + 60 * $(or $(FUZZ_MINUTES),20))); while [ $$(date +%s) -lt $$end ]; do \
		FUZZ=long $(PYTHON) -m pytest --tb=short tests/test_fuzz_settings.py tests/test_fuzz_data.py || exit 1; done

lint: $(VENV)/.ready-dev ## ruff, mypy, shellcheck, hadolint, zizmor
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy train
	$(VENV)/bin/shellcheck docker/*.sh .ci/*
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/zizmor --offline --quiet .github
docs: $(VENV)/.ready ## write env.example and README's settings table from the settings
	$(PYTHON) -m tests.generated

lock: $(UV) ## resolve the requirements into the locks
	$(COMPILE) requirements.in --output-file requirements.lock
	$(COMPILE) requirements/dev.in --override requirements/override.txt --output-file requirements/dev.lock
	$(COMPILE) requirements.in --override requirements/cuda12.8.txt --output-file requirements/cuda12.8.lock
	$(COMPILE) requirements/uv.in --output-file requirements/uv.lock

lock-check: $(UV) ## fail when a lock does not match its requirements
	@rm -rf .cache/lock && mkdir -p .cache/lock && cp -r requirements requirements.in requirements.lock .cache/lock
	$(MAKE) --no-print-directory -C .cache/lock -f $(CURDIR)/Makefile lock UV=$(abspath $(shell command -v $(UV)))
	diff requirements.lock .cache/lock/requirements.lock && diff -r requirements .cache/lock/requirements

sbom: $(UV) ## list what the image installs from the lock, as CycloneDX, in sbom.json
	$(UV) tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements $(LOCK) --output-file sbom.json
scan: $(UV) ## look the locked packages up among the known vulnerabilities
	$(UV) tool run --quiet pip-audit==2.10.1 --strict --disable-pip --require-hashes --requirement $(LOCK)
publish: ## push the image; the release workflow does this by digest, with SBOM, provenance and signature
	$(DOCKER) push $(IMAGE)
clean: ## remove what setup, demo and tests made
	rm -rf .venv .venv-* .uv .cache outputs sbom.json .pytest_cache .ruff_cache .mypy_cache

.uv/bin/uv: requirements/uv.lock
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --require-hashes --requirement requirements/uv.lock
	@touch $@

$(VENV)/.ready: $(LOCK) $(UV)
	$(UV) venv --quiet --clear --python '>=3.11,<3.14' $(VENV)
	$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(VENV) $(LOCK)
	@touch $@

$(VENV)/.ready-dev: requirements/dev.lock $(VENV)/.ready
	$(UV) pip install --quiet --no-deps --require-hashes --compile-bytecode --python $(VENV) -r requirements/dev.lock
	@touch $@

$(DEMO_MODEL)/config.json: $(VENV)/.ready-dev demo/model.py
	@rm -rf $(DEMO_MODEL) && mkdir -p .cache
	$(PYTHON) demo/model.py $(DEMO_MODEL)
	@touch $@
