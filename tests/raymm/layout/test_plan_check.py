"""Differences between the graph of a plan and that of a model."""

import pytest

from raymm.layout.plan_check import differences
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode


def graph(vision=(False, True), llm=(True, True), projector=True):
    return ModuleGraph(
        (ModuleNode("vision", vision, projector), ModuleNode("llm", llm)), (("vision", "llm"),)
    )


def test_equal_graphs_have_no_difference():
    assert differences(graph(), graph()) == []


@pytest.mark.parametrize(("model", "text"), [
    (ModuleGraph((ModuleNode("llm", (True, True)),), ()),
     "the plan has a module 'vision', the model does not"),
    (graph(llm=(True,) * 3), "'llm' has 2 blocks in the plan, 3 in the model"),
    (graph(llm=(True, False)), "layer 1 of 'llm' is trained in the plan, frozen in the model"),
])
def test_a_difference_names_module_and_values(model, text):
    assert text in differences(graph(), model)


def test_a_projector_is_missing_on_one_side():
    bare = graph(vision=(False,), projector=False)
    assert differences(graph(), bare) == ["'vision' has a projector in the plan only"]
    assert differences(bare, graph()) == ["'vision' has a projector in the model only"]
