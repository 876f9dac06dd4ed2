# make run       trains the quickstart's model    make check      lint, format, types, imports
# make run-vllm  the same with vLLM               make test-long  runs the rest: more whole runs, about as long again
# make test      runs the tests; those of vLLM once `make vllm` has installed it
#                                                 make test-campaign  random faults from hundreds of seeds
#                                                 make clean      removes what these made
#
# Everything goes into .venv, runs/ and models/. Variables: PYTHON (3.11 or newer), TORCH (what pip installs first; pip's own
# options may follow), ARGS (appended to the controller's or pytest's command line), JOBS (tests run at the same time).

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 2

BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv/.vllm
MODEL := models/quickstart/warm_start.json

# The models of the quickstart and the tests are tiny: more threads cost more than they bring.
export OMP_NUM_THREADS ?= 1

.PHONY: install vllm model run run-vllm test test-long test-campaign check clean

install: $(INSTALLED)

vllm: $(VLLM)

# torch comes first so that the dependencies find it: its build (CPU, or a CUDA version) is then yours to choose.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed; $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev,envs]'
	@touch $@

$(VLLM): tools/install_vllm.py $(INSTALLED)
	$(BIN)/python tools/install_vllm.py
	@touch $@

model: $(MODEL)

$(MODEL): | $(INSTALLED)
	$(BIN)/python examples/prepare_quickstart.py models/quickstart

run: $(INSTALLED) $(MODEL)
	$(BIN)/python -m controller --config examples/quickstart.yaml --resume never $(ARGS)

run-vllm: $(VLLM) $(MODEL)
	$(BIN)/python -m controller --config examples/quickstart_vllm.yaml --resume never $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m 'not long and not campaign' $(ARGS)

test-campaign: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m campaign $(ARGS)

test-long: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m long $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

clean:
	rm -rf .venv models/quickstart models/quickstart.unfinished runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
