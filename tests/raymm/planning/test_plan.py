"""Tables and texts of a plan."""

from dataclasses import replace

import pytest

from raymm.planning.inputs import Costs
from raymm.planning.plan import Planned
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage

LAYER = LayerCost(0.01, 0.01, 0.01, activation_bytes=100, output_bytes=1)
GRAPH = ModuleGraph(
    (ModuleNode("vision", (False,)), ModuleNode("llm", (True,) * 2)), (("vision", "llm"),)
)


def _planned(stages: list[Stage], microbatches: int = 8, price: float | None = None) -> Planned:
    profile = CostProfile({"vision": (LAYER,), "llm": (LAYER,) * 2}, tokens={"llm": 1000})
    plan = Plan(GRAPH, tuple(stages), microbatches, "1f1b", profile)
    return Planned.evaluated(plan, Costs(profile, dollars_per_gpu_hour=price))


def _replicas(llm_ranks: list[list[int]], vision_ranks: list[int]) -> list[Stage]:
    return [
        *(Stage("vision", 0, (0, 1), rank, number) for number, rank in enumerate(vision_ranks)),
        *(
            Stage("llm", index, (index, index + 1), ranks[index], number)
            for index in range(2) for number, ranks in enumerate(llm_ranks)
        ),
    ]


def test_equal_replicas_share_a_row() -> None:
    """Adjacent ranks are a range, others a list without its middle."""
    rows = _planned(_replicas([[0, 4], [1, 5], [2, 6], [3, 7]], [0, 1, 2, 3])).rows()
    assert [(row["module"], row["stage"], row["rank"], row["GPU"]) for row in rows] == [
        ("vision", "0 x4 *", "0-3", "0:0-3"), ("llm", "0 x4", "0-3", "0:0-3"),
        ("llm", "1 x4", "4-7", "0:4-7"),
    ]
    rows = _planned(_replicas([[0, 1], [2, 3], [4, 5], [6, 7]], [0, 2, 4, 6])).rows()
    assert [row["rank"] for row in rows] == ["0, 2 .. 6", "0, 2 .. 6", "1, 3 .. 7"]


def test_replicas_with_other_values_have_their_own_row() -> None:
    """The second replica of the language model has the encoder on its first rank."""
    planned = _planned(_replicas([[0, 2], [1, 3]], [1]))
    rows = planned.rows()
    llm = [row for row in rows if row["module"] == "llm"]
    assert [(row["stage"], row["rank"]) for row in llm] == [
        ("0", "0"), ("0@1", "1"), ("1 x2", "2-3"),
    ]
    assert llm[0]["bubble"] != llm[1]["bubble"] == '"'
    assert len(planned.table().rows) == len(rows)


@pytest.mark.parametrize("price", [None, 2.0])
def test_the_prediction_has_rates_per_gpu_and_the_price(price: float | None) -> None:
    planned = _planned(_replicas([[0, 1]], [0]), price=price)
    rate = 8 * 1000 / planned.seconds
    text = planned.explain()
    assert f"{rate:,.0f} tokens/s ({rate / 2:,.0f} per GPU)" in text
    dollars = f"{2 * 2.0 / 3600 / rate * 1e6:.3g} dollars per million tokens"
    assert (dollars in text) == (price is not None)


def test_ranks_that_are_idle_for_most_of_a_step_have_a_note() -> None:
    planned = _planned([Stage("vision", 0, (0, 1), 0), Stage("llm", 0, (0, 2), 1)])
    idle = planned.timeline.bubble(0)
    assert idle > 0.5 > planned.timeline.bubble(1)
    notes = [line for line in planned.explain().splitlines() if "is idle" in line]
    assert notes == [f"note: rank 0 (vision.0) is idle for {idle:.0%} of the step"]


def test_the_utilization_is_that_of_all_gpus() -> None:
    device = find_device("H100")
    planned = _planned(_replicas([[0, 1]], [0]))
    costs = replace(planned.costs, device=device, flops=0.3 * device.peak("fp32"))
    known = Planned.evaluated(replace(planned.plan, profile=None), costs)
    share = 8 * 0.3 / 2 / known.seconds
    assert f", MFU {share:.1%}" in known.explain()
    assert "MFU" not in planned.explain()  # nor a device
