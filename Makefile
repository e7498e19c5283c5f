# make run    set up what is missing and run recipes/denoise.yaml
# make test   set up what is missing, lint, and run the tests
# make lint   ruff and mypy
# make bench  measure speed against published style and against the machine; a few minutes, $BLT_DATA is used if set
# make docs   write the generated pages of docs/ from the code
# make gallery  run the scripts of docs/gallery, a few minutes, and write their pages and pictures
# make site   build the documentation as a site in build/site, from what is installed and without a network
# make clean  remove the virtual environment and all caches
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or newer); otherwise the first suitable one is taken.
# All names are relative, and scripts are run as modules, so that the checkout may lie in a path with spaces.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run test bench lint format docs gallery site clean FORCE

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: $(STAMP)
	@echo '== blt run recipes/denoise.yaml'
	@$(PY) -m bltoolbox run recipes/denoise.yaml

test: lint
	@echo '== pytest'
	@$(PY) -m pytest -q -n 2 --dist worksteal

bench: $(STAMP)
	@echo '== peers'
	@$(PY) tests/benchmarks/peers.py
	@echo '== speed'
	@$(PY) tests/benchmarks/speed.py
	@echo '== start-up'
	@$(PY) tests/benchmarks/startup.py
	@echo '== growth'
	@$(PY) tests/benchmarks/growth.py

lint: $(STAMP)
	@echo '== ruff check'
	@$(PY) -m ruff check .
	@echo '== ruff format --check'
	@$(PY) -m ruff format --check .
	@echo '== mypy'
	@$(PY) -m mypy

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(STAMP)
	@echo '== generating docs'
	@$(PY) -m docs.generate docs

gallery: $(STAMP)
	@echo '== docs/gallery'
	@$(PY) -m docs.generate.gallery

site: $(DOCS_STAMP)
	@echo '== mkdocs build --strict'
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'open build/site/index.html'

clean:
	@echo '== removing $(VENV) and caches'
	@rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the folder it was made in: an editable install points there, so a moved checkout installs anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml
	@if ! $(PY) -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	    python=; \
	    for candidate in "$${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do \
	        if [ -n "$$candidate" ] && "$$candidate" -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo 'error: no Python 3.11 or newer with the venv module was found; install one, or say make PYTHON=/path/to/python' >&2; \
	        exit 1; \
	    fi; \
	    echo "== making $(VENV) with $$("$$python" -V)"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo '== installing bltoolbox and what it needs (the first time downloads PyTorch)'
	@$(PY) -m pip install --quiet -e '.[test]'
	@printf "%s\n" "$(CURDIR)" > $@

$(DOCS_STAMP): $(STAMP)
	@echo '== installing what builds the documentation'
	@$(PY) -m pip install --quiet -e '.[docs]'
	@touch $@
