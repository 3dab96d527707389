# Everything a fresh machine needs is Python and make. `make demo` and `make test` install what is missing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo
SITE   := $(VENV)/.site

# The oldest versions that pyproject.toml promises, and the newest of everything. Torch from a package index may bring
# CUDA packages of gigabytes; `make test-oldest TORCH=2.13.0` takes another version, such as one that is on the machine.
OLDEST       := .venv-oldest
NEWEST       := .venv-newest
PACKAGE      := .venv-package
OLD_VERSIONS := transformers==5.17.0 accelerate==1.14.0 'huggingface_hub<2'

# One thread per process: the processes of a test or a demo share the machine's cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# Many processes import the same modules: their bytecode is kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-slow test-oldest test-newest package golden fuzz lint format docs site bench gpu-check gpu-check-dry clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv and install hf_helix into it, with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(DEMO)

# Half the bytes of all that development needs.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[recipes,html,pictures]'
	@touch $@

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[site]'
	@touch $@

demo: $(DEMO)  ## train a small Llama on two processes over an emulated link, and show what overlap gains
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu_tp2.yaml recipes/pretrain.py --output_dir runs/demo \
		--link even --gradient_accumulation_steps 8 --max_steps 30

test: $(STAMP)  ## run the tests, in two processes
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: $(SITE)  ## run the tests that take minutes and the further combinations, in two processes; about two hours
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

test-oldest:  ## run the tests in .venv-oldest, with the oldest versions that are promised; TORCH=... for another torch
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet torch==$(or $(TORCH),2.11.0) $(OLD_VERSIONS) --editable '.[dev]'
	$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist worksteal

test-newest:  ## run the tests in .venv-newest, with the newest version of every package; TORCH=... for another torch
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager $(if $(TORCH),torch==$(TORCH)) \
		--editable '.[dev]'
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --dist worksteal

package:  ## build sdist and wheel in dist/, install the wheel alone into .venv-package, and run what a user runs first
	rm -rf dist $(PACKAGE)
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet build
	$(PACKAGE)/bin/python -m build
	$(PACKAGE)/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[recipes,html,pictures]"
	$(PACKAGE)/bin/python tests/support/packaged.py

golden: $(STAMP)  ## record graphs, plans, programs, predictions and checkpoints in runs/golden.json; about ten minutes
	mkdir -p runs
	PYTHONPATH=tests $(BIN)/python -m support.golden_record record runs/golden.json

fuzz: $(STAMP)  ## run the tests of properties on cases drawn anew; repeat at will
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=default

lint: $(STAMP)  ## check style, types, and the share of vague words in docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/plain_words.py

format: $(STAMP)  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write what the pages take from the code: options, model classes
	$(BIN)/python docs/generate.py

site: $(SITE)  ## build the pages and the API reference in runs/site/index.html; a broken link is an error
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## step time on one process against the stock Trainer, and the executor's cost per operator
	$(BIN)/python -m benchmarks.trainers stock
	$(BIN)/python -m benchmarks.executor_overhead

gpu-check:  ## check the package on a GPU; PYTHON=... is a Python that has torch with CUDA, transformers and accelerate
	$(PYTHON) -m benchmarks.gpu

gpu-check-dry: $(STAMP)  ## the same on the CPU with tiny sizes: shows that the checks run
	$(BIN)/python -m benchmarks.gpu --dry

clean:  ## remove what was built
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(PACKAGE) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
