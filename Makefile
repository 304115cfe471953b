# `make train` (a real three-modality run on this machine), `make test`, `make test-system` (whole
# commands, clusters and kernels in processes of their own, which the former leaves out), `make
# test-sweep` (further layouts and models of tests of which `make test` runs some),
# `make test-fast` (without Ray and Triton's interpreter), `make explore` (property tests on new
# examples, and more of them) and `make docs` (the pages for users). All create .venv and install
# what they need: `make train` what training needs, the others in addition what tests need.
# `make gpu PYTHON=python3` installs nothing: all that only a GPU can say, in nine minutes; `make gpu-more` is the second part of it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= stamps
STEPS ?=
# Further settings of `make train`, as section.field=value.
SET ?=
RUN_DIR ?= runs/$(DATA)
# Processes that share the tests, each with a Ray cluster of its own; who is done first takes over
# some of the others'.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --durations 20
# Of a test while it explores.
EXPLORE_TIMEOUT_S := 3600
export RAYMM_CACHE ?= $(HOME)/.cache/raymm

.PHONY: train train-vlm test test-system test-sweep test-fast explore prepare ruff lint docs gpu gpu-more clean

INSTALL := $(BIN)/python -m deploy.install
$(VENV)/.train: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) 'installing what training needs into $(VENV)' \
	    --constraint constraints.txt --editable '.[example,vlm]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@$(INSTALL) 'installing what tests need into $(VENV)' \
	    --constraint constraints.txt --editable '.[dev]'
	@touch $@

prepare: $(VENV)/.train
	$(BIN)/python -m examples.alignment.prepare --data $(DATA)

# Goes on from the last checkpoint of $(RUN_DIR); remove the folder to start anew.
train: prepare
	$(BIN)/raymm train examples/alignment/$(DATA).yaml \
	    --set run.storage_path=$(RUN_DIR) $(if $(STEPS),--set run.steps=$(STEPS)) \
	    $(addprefix --set ,$(SET))

# A whole vision-language model of real weights: assembled, trained, exported and checked.
train-vlm: RUN_DIR = runs/vlm
train-vlm: $(VENV)/.train
	$(BIN)/python -m examples.vlm.real --to $(RAYMM_CACHE)/vlm
	$(BIN)/raymm train $(VLM) $(VLM_SET)
	rm -rf $(RUN_DIR)/exported
	$(BIN)/raymm export $(VLM) $(VLM_SET) --out $(RUN_DIR)/exported
	$(BIN)/python -m examples.vlm.check_run $(VLM) $(VLM_SET) --exported $(RUN_DIR)/exported

VLM := examples/vlm/real.yaml
VLM_SET = --set run.storage_path=$(RUN_DIR) $(if $(STEPS),--set run.steps=$(STEPS)) \
    $(addprefix --set ,$(SET))

ruff: $(VENV)/.dev
	$(BIN)/python -m ruff check .

# Types take over a minute, and the tests do not wait for them.
lint: ruff
	$(BIN)/pyright

test: ruff
	$(PYTEST) -m "not system and not sweep"

test-system: ruff
	$(PYTEST) -m system

test-sweep: ruff
	$(PYTEST) -m sweep

test-fast: ruff
	$(PYTEST) -m "not ray and not triton and not system and not sweep"

# What fails is printed as an example to put over the test, where every run tries it.
explore: $(VENV)/.dev
	$(PYTEST) -m hypothesis --hypothesis-profile explore --timeout $(EXPLORE_TIMEOUT_S)

# The pages for users as a site, in build/docs; a link to nothing fails.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Needs torch, transformers, triton and numpy in $(PYTHON). Writes a file named like the device;
# GPU_OPTIONS='--device cpu' tries the code where there is no GPU.
GPU_OPTIONS ?=
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU_OPTIONS)

# The second part of it: a rank's recovery, a step of Qwen3-VL-2B's size, copies to the host.
gpu-more:
	$(PYTHON) -m benchmarks.gpu --more $(GPU_OPTIONS)

clean:
	rm -rf $(VENV) build runs
