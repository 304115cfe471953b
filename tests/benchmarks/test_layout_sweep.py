"""Quick part of the layout sweep, and errors that its comparison detects."""

from __future__ import annotations

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.layout_sweep import quick_cells
from benchmarks.shared import sweep_cells
from benchmarks.shared.family_check import REFUSED, UNCLEAR, WRONG
from benchmarks.shared.sweep_cells import Cell, cells, outcomes
from benchmarks.shared.sweep_oracle import Training
from benchmarks.shared.sweep_tables import FEATURES, LAYOUTS, OPTIONS, PLAIN, ROPES
from raymm.actors.optimizer.optimizer_config import ALGORITHMS, PARAMETERS
from raymm.errors import Error

PLAIN_CELL = Cell("text only", PLAIN, "one process")


@pytest.mark.cells(1)
@pytest.mark.parametrize("part", range(16))
def test_no_quick_cell_is_wrong_or_unclear(ray_cluster, part):
    chosen = quick_cells()
    assert len(chosen) >= 30
    results = dict(outcomes(chosen[part::16]))
    bad = {str(c): o.sentence for c, o in results.items() if o.result in (WRONG, UNCLEAR)}
    assert bad == {}


def test_tables_have_all_rope_types_and_optimizers():
    assert set(ROPES) == set(ROPE_INIT_FUNCTIONS)
    rules = [option.config for option in OPTIONS.values()]
    assert {rule.name for rule in rules} == set(ALGORITHMS)
    assert {rule.parameters for rule in rules} == set(PARAMETERS)
    assert len(set(map(str, cells(FEATURES, OPTIONS, LAYOUTS)))) >= 300


@pytest.mark.parametrize("kind", ["losses", "gradients", "after"])
def test_small_errors_are_wrong(ray_cluster, monkeypatch, kind):
    """Change one part of the reference in a thousand, in one tensor."""
    def altered(*arguments: object, **options: object) -> Training:
        found = trained(*arguments, **options)
        values = getattr(found, kind)
        key = 0 if kind == "losses" else next(name for name in values if "layers.2.mlp" in name)
        if kind == "after":
            values[key] = values[key] + (values[key] - found.before[key]) * 2e-3
        else:
            values[key] = values[key] * 1.001
        return found

    trained = sweep_cells.trained
    monkeypatch.setattr(sweep_cells, "trained", altered)
    [(_, outcome)] = outcomes([PLAIN_CELL])
    assert outcome.result == WRONG
    assert "batch 1" in outcome.sentence if kind == "losses" else "layers.2.mlp" in outcome.sentence


def test_refusals_name_the_combination(monkeypatch):
    refused = Cell("text only", PLAIN, "ep 2")
    [(_, outcome)] = outcomes([refused])
    assert outcome.result == REFUSED and "ep of 'llm' is 2" in outcome.sentence

    def nameless(*_: object, **__: object) -> None:
        raise Error("this does not work")

    monkeypatch.setattr(sweep_cells, "described", nameless)
    monkeypatch.setattr(sweep_cells, "trained", lambda *_, **__: None)
    [(_, outcome)] = outcomes([refused])
    assert outcome.result == UNCLEAR and "names none of" in outcome.sentence


def test_other_exceptions_are_unclear(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(sweep_cells, "described", broken)
    monkeypatch.setattr(sweep_cells, "trained", lambda *_, **__: None)
    [(_, outcome)] = outcomes([PLAIN_CELL])
    assert outcome.result == UNCLEAR and "AttributeError" in outcome.sentence
