# promptmill. `make` lists the targets. Only relative paths here: make cannot hold a space in a path,
# and the folder of this checkout may have one.

PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3.14 python3 python,$(if $(shell command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo yes),$(name))))
VENV := .venv
RUN := $(VENV)/bin/python -m
MODEL := smollm2-135m-instruct
WORKERS ?= 2
# such as --extra-index-url https://download.pytorch.org/whl/cpu for the smaller torch without CUDA
PIP_ARGS ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup up demo test check screenshot lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.installed ## make .venv, install all packages, fetch the default model (does nothing twice)
	@$(RUN) promptmill models pull $(MODEL)

up: setup ## run everything on this machine and stay (ARGS="--port 8080")
	@$(RUN) promptmill up $(ARGS)

demo: setup ## run everything, show one streamed answer, stop
	@$(RUN) promptmill demo --port 0 --flower-port 0 $(ARGS)

test: setup ## all tests but chaos, soak and cuda (ARGS="-k name")
	$(RUN) pytest -m "not chaos and not soak and not cuda" -n $(WORKERS) --dist loadgroup $(ARGS)

check: $(VENV)/.installed ## format, lint, types, layers, links of the docs
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(VENV)/bin/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	$(VENV)/bin/python .ci/check_links.py

screenshot: setup ## docs/flower.png, by the system's Chromium; fails unless a running job is on it
	@$(VENV)/bin/python .ci/flower_screenshot.py

lock: $(VENV)/.installed ## write the versions installed now to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; $(RUN) pip freeze --exclude-editable --exclude promptmill | sed 's/+cpu$$//; s/+cu[0-9]*$$//' | grep -v '^nvidia-\|^triton' | LC_ALL=C sort -f; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean: ## remove what was built; data and models in var/ stay
	rm -rf $(VENV) build dist promptmill.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "promptmill needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || "$(PYTHON)" -m venv $(VENV)
	@echo "installing the pinned packages (2 GB on disk, a few minutes the first time)"
	@$(RUN) pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@
