"""Replicas of modules with different degrees equal one process.

Every microbatch runs through one replica of each module, and gradients are summed over replicas
exactly once.
"""

from dataclasses import replace

import pytest

from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.search.layouts import replicated
from raymm.scheduler.search.module_degrees import ModuleDegrees
from raymm.scheduler.search.stage_space import StageSpace
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of


def model_of(frozen: bool = False) -> MultimodalModule:
    return MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=frozen),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(pm.llama(tied=True), 3), frozen=frozen),
    )


def step() -> list[dict]:
    """Return four microbatches: with both modalities, one, the other, and none."""
    return [
        pm.batch([7, 5], 4, vision=[0, 0], audio=[1]),
        pm.batch([6, 8], 5, vision=[0, 1]),
        pm.batch([4, 9], 6, audio=[0]),
        pm.batch([10], 7),
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("vision", "audio", "llm"),
    [
        ({"dp": 1}, {"dp": 1}, {"dp": 2}),
        ({"dp": 2}, {"dp": 1}, {"dp": 2}),
        ({"dp": 2, "ranks": (0, 1)}, {"dp": 4, "ranks": (0, 1, 2, 3)}, {"dp": 2, "ranks": (2, 3)}),
        ({"dp": 1}, {"dp": 1, "ranks": (0,)}, {"dp": 2, "pp": 2, "ranks": (1, 2, 3, 4)}),
    ],
    ids=["llm", "vision-and-llm", "shared-ranks", "pipelines"],
)
def test_degrees(ray_cluster, vision, audio, llm):
    model = model_of()
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(**vision), "audio": ParallelSpec(**audio)}, ParallelSpec(**llm), 4
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_gradients(parallel, oracle, step()[2:], step()[:2])  # fewer than planned
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()[1:]]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("window", [range(2), range(1)], ids=["every rank", "first rank"])
def test_replicas_of_a_layout_with_shared_ranks(ray_cluster, window):
    """Put encoders next to stages of the language model, in two equal parts, as planned."""
    model = model_of()
    oracle = oracle_of(model)
    graph = module_graph(model)
    costs = {n.name: (LayerCost(1.0, 1.0, 1.0),) * n.num_layers for n in graph.nodes}
    degrees = dict.fromkeys(costs, ModuleDegrees(dp=2, sharding="zero1"))
    space = StageSpace(graph, CostProfile(costs), 6, 4, degrees=degrees, by_part=True)
    plan = replicated(space, 2, {"vision": window, "audio": window}).whole()
    assert plan.num_ranks == 4 and len(plan.replicas("llm")) == 2
    assert len(plan.replicas("vision")) == len(plan.replicas("audio")) == 2 * len(window)
    plan = replace(plan, schedule="zero_bubble")
    with ParallelModel(model, plan, optimizer=OPTIMIZER, timeout_s=120) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()[1:]]])


def test_a_frozen_language_model_in_replicas(ray_cluster):
    """Train only projectors; gradients pass through each replica to the one encoder."""
    model = model_of(frozen=True)
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({}, ParallelSpec(dp=2), 4, "zero_bubble", recompute=True)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()], [step()]])


def test_the_former_name_works_and_warns():
    with pytest.warns(FutureWarning, match="replicas is now called dp"):
        spec = ParallelSpec(replicas=2)
    assert spec == ParallelSpec(dp=2)
    with pytest.warns(FutureWarning), pytest.raises(PlanError, match="dp is 3"):
        ParallelSpec(replicas=2, dp=3)
