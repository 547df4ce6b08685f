# `make demo` and `make test` work on a fresh machine with Python >= 3.11 and make: each creates .venv and installs
# what it needs. A second run finds the stamps below and starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt

LAB := $(VENV)/.installed-lab
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test slow fuzz docs lint format freeze clean distclean

help:  ## Say what can be made.
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(LAB)  ## Race SGD, Adam and Muon against C-SGD and C-Adam on handwritten digits (half a minute).
	@$(BIN)/consequent demo

test: $(DEV) lint  ## Lint, types, doctests and all tests but the slow ones (four to six minutes on two cores).
	@echo "==> tests and doctests (two processes, one thread each)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

slow: $(DEV)  ## The slow tests, which continuous integration runs as well.
	@echo "==> slow tests (two processes, one thread each)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

fuzz: $(DEV)  ## Random networks and training loops against an independent reference, LOOPS of them (default 10,000).
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz --loops $(or $(LOOPS),10000) --mode own
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz --loops $(or $(LOOPS),10000) --mode averages

docs: $(DEV)  ## Build the documentation into site/ (open site/index.html); a warning is an error.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(DEV)  ## Check style, formatting and types.
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy --strict"
	@$(BIN)/mypy

format: $(DEV)  ## Format the code and repair what ruff can repair.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

freeze: $(DEV)  ## Rewrite constraints.txt from .venv (see its first lines).
	@{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude-editable --exclude pip | sed -E 's/\+cpu$$//'; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:  ## Remove caches and outputs; .venv stays.
	@rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.png demo.json report.html
	@find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## Remove .venv as well.
	@rm -rf $(VENV)

# torch comes first and by its exact version: with a looser requirement and no torch installed, pip takes the newest
# build it finds, which may bring gigabytes of GPU libraries. Where pip knows of a CPU build it takes that one.
$(LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "the versions in constraints.txt need Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing torch (once; this takes a minute)"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "==> installing consequent and its lab"
	@$(INSTALL) -e '.[lab]'
	@touch $@

$(DEV): $(LAB) requirements-oracles.txt requirements-oracles-dependencies.txt
	@echo "==> installing what the tests need"
	@$(INSTALL) -e '.[lab,dev]'
	@echo "==> installing the oracles that the tests compare with"
	@$(INSTALL) -r requirements-oracles-dependencies.txt
	@$(INSTALL) --no-deps -r requirements-oracles.txt
	@touch $@
