"""Costs and memory limits of a search for a plan."""

import pytest

from raymm.errors import PlanError
from raymm.planning.inputs import Costs, PlanInputs, costs_of, loads_of
from raymm.planning.request import PlanRequest, Workload
from raymm.scheduler.costs.device_memory import usable_bytes
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.schedule.memory import GIB
from raymm.scheduler.schedule.network import Network
from tests.raymm.costs.test_step_flops import batch, described

WORK = Workload(4, samples=2, text=10)
LAYER = LayerCost(1.0, 1.0, 1.0)


def test_the_links_of_a_profile_are_those_of_its_device():
    device = find_device("H100")
    costs = Costs(CostProfile({"llm": (LAYER,)}), device, 4)
    assert costs.profile.links == costs.network.links
    assert costs.network == Network(device.within_node, device.across_nodes, 4)
    assert Costs(CostProfile({"llm": (LAYER,)})).network == Network()


@pytest.mark.parametrize(("device", "gib", "expected"), [
    (None, None, None), ("cpu", None, None), ("H100", None, usable_bytes(find_device("H100"))),
    ("H100", 1.5, int(1.5 * GIB)), (None, 2, 2 * GIB),
])  # fmt: skip
def test_the_memory_limit_is_given_or_the_devices(device, gib, expected):
    costs = Costs(CostProfile({"llm": (LAYER,)}), device and find_device(device))
    assert costs.memory_limit(gib) == expected
    with pytest.raises(PlanError, match="memory_gib is 0; it must be above 0"):
        costs.memory_limit(0)


def test_given_tokens_replace_those_of_the_microbatch():
    model = described()
    work = Workload(4, microbatch=batch([7, 3], [0, 1]))
    loads = loads_of(model, work, {"llm": 40}).by_module
    assert loads["llm"].tokens == 40 and loads["llm"].samples == 2
    assert loads["vision"] == loads_of(model, work, {}).by_module["vision"]
    assert loads_of(model, WORK, {"vision": 3}).by_module["llm"].tokens == 10 + 3


def test_costs_without_a_device_are_a_cpus_with_a_note():
    model = described()
    costs = costs_of(model, PlanRequest(), WORK)
    assert costs.device == find_device("cpu")
    assert costs.notes[-1] == "no device is named: costs are those of one CPU core"
    faster = costs_of(model, PlanRequest(device="H100"), WORK)
    assert faster.profile.modules["llm"][0].forward < costs.profile.modules["llm"][0].forward


def test_a_measured_profile_names_the_device_and_scales_tokens():
    layers = (LAYER,) * 3
    table = ProfileTable(
        {"vision": (Measurement(8, 2, layers),), "llm": (Measurement(20, 2, layers),)},
        {"vision": 8, "llm": 20}, "NVIDIA H100 80GB HBM3", "bf16", {}, "",
    )
    costs = costs_of(described(), PlanRequest(profile=table, tokens={"llm": 10}), WORK)
    assert costs.device == find_device("H100")
    assert costs.profile.modules["llm"][0].forward == LAYER.forward
    with pytest.raises(PlanError, match="tokens name 'audio'"):
        costs_of(described(), PlanRequest(profile=table, tokens={"audio": 1}), WORK)


def test_cached_features_of_frozen_blocks_take_no_forward():
    model = described(vision=True)
    costs = costs_of(model, PlanRequest(keeps_features=True), WORK)
    plain = costs_of(model, PlanRequest(), WORK)
    *blocks, projector = costs.profile.modules["vision"]
    assert [layer.forward for layer in blocks] == [0.0, 0.0]
    assert projector == plain.profile.modules["vision"][-1]
    assert costs.notes[-1] == "planned for epochs in which the features of vision are cached"
    trained = costs_of(described(), PlanRequest(keeps_features=True), WORK)
    assert all("cached" not in note for note in trained.notes)


def test_inputs_need_a_number_of_devices_and_give_the_problem():
    model = described()
    with pytest.raises(PlanError, match="ranks is not given"):
        PlanInputs.of(model, PlanRequest(), WORK)
    request = PlanRequest(ranks=3, device="H100", memory_gib=8, schedules=("gpipe",))
    inputs = PlanInputs.of(model, request, WORK, notes=["a note"])
    assert inputs.costs.notes[-1] == "a note" and inputs.graph == model.graph
    problem = inputs.problem()
    assert (problem.ranks, problem.num_microbatches, problem.schedules) == (3, 4, ("gpipe",))
    assert problem.memory_limit == inputs.memory_limit == 8 * GIB
    assert inputs.parts is model
