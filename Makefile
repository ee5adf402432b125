# Two commands for a fresh machine: `make serve` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 30000
MODEL  ?= checkpoints/tiny-glm-dsa
ARGS   ?=

python := $(VENV)/bin/python
stamp  := $(VENV)/.installed

.PHONY: help install serve test test-all lint docs clean

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(stamp): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"sglang-glm needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=...")'
	@echo "Setting up $(VENV): about 11 GB and a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(python) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

install: $(stamp) ## Set up .venv with the package and everything it needs

serve: $(stamp) ## Serve a GLM checkpoint (MODEL=, PORT=, ARGS=); the trained tiny one by default
	@launch/serve.sh --python "$(python)" --model-path "$(MODEL)" --port "$(PORT)" $(ARGS)

test: $(stamp) ## The suite of every change: no GPU, about ten minutes
	$(python) -m pytest -m "not gpu and not multigpu and not slow"

$(VENV)/.disaggregation: $(stamp)
	@$(python) -m pip install --quiet --disable-pip-version-check --editable '.[disaggregation]'
	@touch $@

test-all: $(VENV)/.disaggregation ## The slow matrix too, on two cores at once
	$(python) -m pytest -m "not gpu and not multigpu" --numprocesses 2 --dist loadgroup

lint: $(stamp) ## ruff, mypy, the layer rule
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy sglang_glm kernels/glm_kernels

docs: $(stamp) ## Regenerate the generated documents
	$(python) -m sglang_glm.compat.document > docs/upstream.md

clean: ## Remove .venv and caches
	rm -rf $(VENV) .cache
