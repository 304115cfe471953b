"""Plans between the styles equal one process.

Colocated encoders on quotas, a guest of a pipeline, replicas of its stages that share samples, all
under 1F1B.
"""

import pytest

from raymm.model.multimodal import module_graph
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.styles.blocks import Block, Guest, Layout, StyleProblem
from tests.parity.test_multiplexed_style import model_of, step
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of
from tests.support.parity_models import batch, llama

pytestmark = pytest.mark.usefixtures("ray_cluster")

ON_QUOTAS = Layout((Block(("vision", "audio"), 1, 2, (6, 4)), Block(("llm",), 2, 2)), 3)
GUESTS = Layout((Block(("vision",)), Block(("llm",), 2, 2, (), (Guest("audio", 2, 2),))), 3)


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", [ON_QUOTAS, GUESTS], ids=["on quotas", "a guest"])
def test_layouts_of_blocks_equal_one_process(layout):
    model = model_of(llama())
    graph = module_graph(model)
    sharing = DeviceSharing(tuple(
        ScalingSurface(n.name, (1, 2), (1, 10), 10, ((2.0, 1.0), (1.0, 0.5)), (0, 0), (0.0, 0.0))
        for n in graph.nodes
    ))
    layers = {n.name: (LayerCost(1.0, 1.0, 1.0),) * n.num_layers for n in graph.nodes}
    problem = StyleProblem(graph, {3: CostProfile(layers, sharing=sharing)}, 6)
    assert problem.allowed(layout)
    plan = problem.plan(layout, "1f1b")
    oracle = oracle_of(model)
    with ParallelModel(model, plan, optimizer=OPTIMIZER, timeout_s=120) as running:
        check_gradients(running, oracle, step(), [batch([4, 6], 9, vision=[1])])
        check_training(running, oracle, [[step(20)], [step(30)]])
