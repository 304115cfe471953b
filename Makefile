# Two commands: `make train` (a real three-modality run on this machine) and `make test`.
# Both create .venv and install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= stamps
STEPS ?=
# Further settings of `make train`, as section.field=value.
SET ?=
RUN_DIR ?= runs/$(DATA)
# Processes that `make test` deals the test files out to, each with a Ray cluster of its own.
JOBS ?= 2
export RAYMM_CACHE ?= $(HOME)/.cache/raymm

.PHONY: train test prepare ruff lint clean

# torch first and alone: the constraint picks a build without several GB of CUDA packages where
# one is at hand, and everything else then finds torch installed.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,example]'
	touch $@

prepare: $(VENV)/.installed
	$(BIN)/python -m examples.alignment.prepare --data $(DATA)

# Goes on from the last checkpoint of $(RUN_DIR); remove the folder to start anew.
train: prepare
	$(BIN)/raymm train examples/alignment/$(DATA).yaml \
	    --set run.storage_path=$(RUN_DIR) $(if $(STEPS),--set run.steps=$(STEPS)) \
	    $(addprefix --set ,$(SET))

ruff: $(VENV)/.installed
	$(BIN)/python -m ruff check .

# Types take over a minute, and the tests do not wait for them.
lint: ruff
	$(BIN)/pyright

test: ruff
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

clean:
	rm -rf $(VENV) runs
