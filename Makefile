# make train        a real three-modality run on this machine
# make test         tests, without those of the next two lines
# make test-system  tests of whole commands, clusters and kernels in separate processes
# make test-sweep   further layouts and models of tests of which `make test` runs some
# make test-fast    tests that start neither Ray nor Triton's interpreter
# make test-smoke   a minute of tests from every part, for a first look
# make explore      property tests on new examples
# make docs         the pages for users
# make gpu          measurements that need a GPU, nine minutes; `make gpu-more` is the second part
#
# All but the GPU commands create .venv and install what they need; `make gpu PYTHON=python3`
# installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= stamps
STEPS ?=
# Further settings of `make train`, as section.field=value.
SET ?=
RUN_DIR ?= runs/$(DATA)
# Processes that run tests, each with a separate Ray cluster; an idle one takes tests of the others.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --durations 20
# Timeout of a property test that tries new examples, in seconds.
EXPLORE_TIMEOUT_S := 3600
export RAYMM_CACHE ?= $(HOME)/.cache/raymm

.PHONY: train train-vlm test test-system test-sweep test-fast test-smoke explore prepare ruff lint docs gpu gpu-more clean

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

# Resumes from the last checkpoint of $(RUN_DIR); remove the folder to start from scratch.
train: prepare
	$(BIN)/raymm train examples/alignment/$(DATA).yaml \
	    --set run.storage_path=$(RUN_DIR) $(if $(STEPS),--set run.steps=$(STEPS)) \
	    $(addprefix --set ,$(SET))

# A vision-language model with pretrained weights: assembled, trained, exported and checked.
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
	$(PYTEST) -m "system and not sweep"

test-sweep: ruff
	$(PYTEST) -m sweep

test-fast: ruff
	$(PYTEST) -m "not ray and not triton and not system and not sweep"

SMOKE := tests/test_house.py tests/test_references.py tests/raymm/config tests/scheduler/graph \
    tests/scheduler/plan tests/scheduler/program tests/kernels/mask/test_mask.py \
    tests/raymm/data/samples/test_row_forms.py tests/parity/test_reference.py \
    tests/parity/test_mapped_degrees.py tests/raymm/cli/test_main.py
test-smoke: ruff
	$(PYTEST) -m "not system and not sweep" $(SMOKE)

# A failing example is printed in the form of a decorator: put it above the test to keep it.
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
