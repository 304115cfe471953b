"""Balance of a step from its metadata and its timeline."""

import numpy as np
import pytest
import torch

from raymm.data import ItemTokens, describe
from raymm.monitor.balance import microbatch_loads, step_balance
from raymm.monitor.progress import step_line
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.timeline import Span, Timeline


def meta_of(lengths, owners=(), size=4):
    """Return metadata of a microbatch of these row lengths, with images of size x size pixels."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    microbatch = {"input_ids": mask.long(), "attention_mask": mask.long(), "labels": mask.long()}
    if owners:
        pixels = torch.zeros(len(owners), 3, size, size)
        microbatch["vision"] = {"pixel_values": pixels, "sample_index": torch.tensor(owners)}
    return describe(microbatch, ["x"] * len(lengths))


def test_loads_count_padding_and_prepended_tokens():
    meta = [meta_of([5, 3], [0, 0, 1]), meta_of([4])]
    loads = microbatch_loads(meta, ["vision"], packed=False)
    np.testing.assert_array_equal(loads, [[3 * 48, 10], [0, 4]])
    tokens = {"vision": ItemTokens(20, 7)}
    assert microbatch_loads(meta, ["vision"], True, tokens)[:, 1].tolist() == [8 + 3 * 7, 4]
    # The longest row has two images of 7 tokens; the other is padded to it.
    assert microbatch_loads(meta, ["vision"], False, tokens)[:, 1].tolist() == [2 * (5 + 14), 4]


def test_items_of_other_shapes_have_other_loads():
    meta = [meta_of([3], [0], size=2), meta_of([3], [0], size=4)]
    assert microbatch_loads(meta, ["vision"], True)[:, 0].tolist() == [12, 48]


@pytest.fixture
def plan():
    """Return a plan with two replicas of the language model."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,))), (("vision", "llm"),)
    )
    stages = (
        Stage("vision", 0, (0, 1), 0), Stage("llm", 0, (0, 1), 1, replica=0),
        Stage("llm", 0, (0, 1), 2, replica=1),
    )
    return Plan(graph, stages, 2)


def test_a_step_with_figures_done_by_hand(plan):
    copies = [stage.id for stage in plan.stages if stage.module == "llm"]
    spans = (
        Span(0, "forward", StageId("vision", 0), 0, 0.0, 1.0),
        Span(0, "forward", StageId("vision", 0), 1, 1.0, 2.0),
        Span(1, "forward", copies[0], 0, 1.0, 3.0),
        Span(1, "recv", copies[0], 0, 0.0, 1.0),
        Span(2, "forward", copies[1], 1, 2.0, 3.0),
    )
    meta = [meta_of([6, 2], [0]), meta_of([4], [0])]
    found = step_balance(meta, ("vision",), True, None, plan, Timeline(spans, 3))
    assert found == {
        "microbatches": 2,
        "dist_ratio": {"vision": 0.0, "text": 0.25},  # 8 and 4 tokens: 1 - 6 / 8
        "efficiency": round(0.5 * (7 / 6 + 5 / 6) / (7 / 6), 4),
        "measured": round(2.5 / 3, 4),  # 3 s and 2 s
        "copies": {"llm": 0.75},  # 2 s and 1 s
    }
    row = {"step": 1, "loss": 1.0, "tokens_per_s": 5.0, "grad_norm": 1.0, "stage_busy": {}}
    assert "balance: 86% (measured 83%)" in step_line({**row, "balance": found}, 2, 5.0)
    assert "balance" not in step_line(row, 2, 5.0)
    found["costs"] = {"error": 0.051}
    assert "(measured 83%, costs off by 5%)" in step_line({**row, "balance": found}, 2, 5.0)


def test_a_step_of_text_alone(plan):
    found = step_balance([meta_of([6]), meta_of([6])], ("vision",), False, None, plan,
                         Timeline((), 3))  # fmt: skip
    assert found["dist_ratio"] == {"vision": 0.0, "text": 0.0} and found["efficiency"] == 1.0
