# The two commands: `make run` and `make test`. Everything they need is installed into .venv from the lock file.
# The first Python 3.11 or newer on the PATH is used; choose another one with `make PYTHON=python3.12 ...`.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-fast test-slow setup lint types unit coverage browser trials benchmarks docs dist check-dist sbom lock clean

run: setup
	$(BIN)/linnet quickstart

test: lint types unit

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml scripts/install_lock.py
	@test -n "$(PYTHON)" || { echo "Linnet needs Python 3.11 or newer, and there is none on the PATH. Fix: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Linnet needs Python 3.11 or newer, this is %d.%d. Fix: make PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python scripts/install_lock.py requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(BIN)/python -m pip --disable-pip-version-check check
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/basedpyright

unit: setup browser
	$(BIN)/pytest -n 3 --dist worksteal -q --quickly --limit 60 --durations 25 -m 'not slow and not trial'
	$(BIN)/pytest -n 2 --dist worksteal -q --limit 60 --durations 25 -m 'optimized and not slow and not trial'

# Tests that compile no model: less than 90 s.
test-fast: setup
	$(BIN)/pytest -n 2 --dist worksteal -q --quickly --fast --durations 10 -m 'not slow and not trial'

# The slow tests: exactness over more settings, meshes, several processes, fresh installs.
test-slow: setup browser
	$(BIN)/pytest -n 2 --dist worksteal -q --quickly --durations 25 -m 'slow and not trial'
	$(BIN)/pytest -n 2 --dist worksteal -q --durations 25 -m 'slow and optimized and not trial'

# Coverage of the quick tests: a table here, a page per file in .coverage-html/. Only code that the tests' own processes run is counted.
coverage: setup browser
	$(BIN)/pytest -n 2 --dist worksteal -q --quickly -m 'not slow and not trial' --cov --cov-report=term --cov-report=html

# Tests of the playground need Chromium, and one example needs curl. CI installs both; elsewhere the tests are skipped if one is missing.
browser:
	@if [ "$$CI" = true ] && ! { command -v chromium && command -v curl; } > /dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium curl > /dev/null; \
	fi

trials: test-slow
	$(BIN)/pytest -q -m trial

# Build the documentation site in site/. Warnings (a dead link, a page outside the navigation) are errors; do not add --quiet, which would
# suppress them.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: .github/docs.lock scripts/install_lock.py
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python scripts/install_lock.py .github/docs.lock
	@touch $@

# Comparisons with baselines and load tests of a server, about ten minutes. `linnet bench` runs the other benchmarks.
benchmarks: setup
	$(BIN)/python -m benchmarks.import_memory
	$(BIN)/python -m benchmarks.serve_http
	$(BIN)/python -m benchmarks.scaling

# Build the wheel and the sdist with the locked tools.
dist: setup
	rm -rf dist
	$(BIN)/python -m hatchling build

# Install the wheel as a user would, with the newest packages that it allows, and run it.
check-dist: dist
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	.venv-wheel/bin/python -m pip --disable-pip-version-check check
	.venv-wheel/bin/linnet verify

# List the packages of that environment as a CycloneDX document (after `make check-dist`).
sbom:
	@test -x .venv-wheel/bin/linnet || { echo "The wheel is not installed in .venv-wheel. Fix: make check-dist" >&2; exit 1; }
	rm -rf .venv-sbom sbom
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python scripts/install_lock.py .github/sbom.lock
	mkdir sbom
	.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --output-format JSON --output-file sbom/linnet-lm.cdx.json .venv-wheel/bin/python

# Rewrite the lock files from pyproject.toml. Needs uv, which is not needed to run or test. Pins that are still valid are kept.
LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet
lock:
	$(LOCK) pyproject.toml --extra dev --output-file requirements.lock
	$(LOCK) --group docs --output-file .github/docs.lock
	$(LOCK) --group sbom --output-file .github/sbom.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* .coverage-html .venv-docs .venv-wheel .venv-sbom dist sbom site
