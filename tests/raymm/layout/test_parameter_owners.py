"""Ownership of parameters: every element's gradient is complete and counted once.

The oracle assigns gradients: for every element of every parameter a number per replica of the
module, per process that shares a microbatch, per stage that uses it, and per tensor-parallel
process that has a part of it. The process that updates an element must get the sum of all.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raymm.actors.optimizer.gradient_reduction import (
    ParameterOwnership,
    ParameterReference,
    SharedParameter,
)
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.sharding.fully_sharded import FullyShardedPlan
from raymm.actors.sharding.parameter_shards import ShardSpec, parts_of
from raymm.actors.sharding.tensor_plan import ParameterShard, TensorPlan
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.weights.source import LiveSource
from raymm.layout.parameter_owners import parameter_ownership, place_of, reduction_groups
from raymm.layout.stage_builders import parameter_sizes
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId

MOST_STAGES = 6
# Elements of parameters in every stage; in both the first and the last; in the projector.
SIZES = {"cut": 12, "packed": 24, "keys": 12, "partial": 3, "norm": 4, "odd": 5}
TIED, TIED_SIZE = "tied", 7
PROJECTOR = {"projector.weight": 6}


def edges(length: int, count: int) -> list[tuple[int, int]]:
    bounds = [length * i // count for i in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def tensor_shard_spec(tp: int) -> ShardSpec:
    """Return a shard spec like a tensor plan's.

    An even cut, a fused pair, fewer key heads than processes, partial gradients on every process,
    and a vocabulary that does not divide.
    """
    heads = max(n for n in (1, 2) if tp % n == 0)
    of_stage = {
        "cut": [ParameterShard(0, (one,)) for one in edges(12, tp)],
        "packed": [ParameterShard(0, ((a, b), (12 + a, 12 + b))) for a, b in edges(12, tp)],
        "keys": [ParameterShard(0, (edges(12, heads)[i * heads // tp],)) for i in range(tp)],
    }
    shards = {
        f"{i}.{name}": tuple(one) for i in range(MOST_STAGES) for name, one in of_stage.items()
    }
    shards[TIED] = tuple(ParameterShard(0, (one,)) for one in edges(TIED_SIZE, tp))
    partial = frozenset(f"{i}.partial" for i in range(MOST_STAGES))
    return ShardSpec({"module": TensorPlan(tp, shards=shards, partial=partial)})


def fully_sharded_spec(shards: int) -> ShardSpec:
    sharded = ("cut", "packed", "keys", "odd")
    lengths = {f"{i}.{name}": SIZES[name] for i in range(MOST_STAGES) for name in sharded}
    return ShardSpec({"module": FullyShardedPlan(shards, lengths)}, shards)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw an encoder and a language model with replicas, chunks, every degree and sharding.

    They have separate ranks, or take turns.
    """
    together = draw(st.booleans())
    nodes, stages, taken = [], [], 0
    degrees = dict.fromkeys(("cp", "tp", "fsdp"), 1)
    copies = pp = 1
    for name in ("vision", "llm"):
        if not (together and nodes):
            fully = draw(st.booleans())
            degrees = {
                "cp": draw(st.integers(1, 3)),
                "tp": 1 if fully else draw(st.sampled_from([1, 2, 4])),
                "fsdp": draw(st.integers(1, 3)) if fully else 1,
            }
            copies, pp = 1 if fully else draw(st.integers(1, 3)), draw(st.integers(1, 3))
        shardings = ["none", "zero1"]
        if degrees["tp"] == copies == 1:
            shardings.append("fsdp")
        sharding = "fsdp" if degrees["fsdp"] > 1 else draw(st.sampled_from(shardings))
        count = pp * draw(st.integers(1, 2))
        nodes.append(ModuleNode(name, (True,) * count))
        first = 0 if together else taken
        stages += [
            Stage(
                name, index, (index, index + 1), first + copy * pp + index % pp, copy,
                sharding=sharding, **degrees,
            )
            for copy, index in product(range(copies), range(count))
        ]
        taken += copies * pp
    return Plan(ModuleGraph(tuple(nodes), (("vision", "llm"),)), tuple(stages), 6)


class Case:
    """Plan with parameters, and the gradients of its processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.processes = plan, Processes(plan)
        self.shard_specs: dict[str, ShardSpec] = {}
        self.owned: dict[str, dict[str, int]] = {}
        for node in plan.graph.nodes:
            one = plan.module_stages(node.name)[0]
            self.shard_specs[node.name] = (
                fully_sharded_spec(one.shards) if one.shards > 1
                else tensor_shard_spec(one.tp) if one.tp > 1 else ShardSpec()
            )
            for stage in plan.module_stages(node.name):
                own = {f"module.{stage.index}.{name}": size for name, size in SIZES.items()}
                is_last = stage.layers[1] == node.num_layers
                if stage.layers[0] == 0 or is_last:
                    own[f"module.{TIED}"] = TIED_SIZE
                self.owned[stage.id] = own | (PROJECTOR if is_last else {})
        self.held = parameter_ownership(self.processes, self.owned, self.shard_specs)
        self.gradients: dict[tuple[int, str, str], torch.Tensor] = {}
        self.totals: dict[tuple[str, str], torch.Tensor] = {}
        self._hand_out()

    def _hand_out(self) -> None:
        random = torch.Generator().manual_seed(0)
        for stage in self.plan.stages:
            shard_spec = self.shard_specs[stage.module]
            for name, size in self.owned[stage.id].items():
                total = self.totals.setdefault((stage.module, name), torch.zeros(size).long())
                made = {}
                for number in self.processes.of_rank(stage.rank):
                    process = self.processes.all[number]
                    # Replicated computations of tensor-parallel processes count once.
                    alike = not self._has_part(shard_spec, name)
                    who = (self.processes.data_place(process), 0 if alike else process.tp)
                    if who not in made:
                        made[who] = torch.randint(1, 10**6, (size,), generator=random)
                        total += self._within(shard_spec, name, number, made[who])
                    self.gradients[number, stage.id, name] = made[who]
                if shard_spec.shards > 1 and shard_spec.shard(name, 0) is not None:
                    # FSDP has already summed each shard.
                    summed = sum(made.values())
                    for number in self.processes.of_rank(stage.rank):
                        self.gradients[number, stage.id, name] = summed
        for key, whole in self.gradients.items():
            self.gradients[key] = self.take(*key, whole)

    def _has_part(self, shard_spec: ShardSpec, name: str) -> bool:
        """Return True if a tensor-parallel process's gradient is only a part."""
        return shard_spec.shards == 1 and (
            shard_spec.shard(name, 0) is not None or len(shard_spec.sharers(name, 0)) > 1
        )

    def _within(
        self, shard_spec: ShardSpec, name: str, number: int, whole: torch.Tensor
    ) -> torch.Tensor:
        """Return zero where a tensor-parallel process has no part of the parameter."""
        shard = shard_spec.shard(name, place_of(self.processes, number, shard_spec))
        if shard is None or shard_spec.shards > 1:
            return whole
        inside = torch.zeros_like(whole)
        for start, stop in shard.ranges:
            inside[start:stop] = whole[start:stop]
        return inside

    def take(self, number: int, stage: str, name: str, whole: torch.Tensor) -> torch.Tensor:
        shard_spec = self.shard_specs[self.plan.by_id[stage].module]
        shard = shard_spec.shard(name, place_of(self.processes, number, shard_spec))
        return whole if shard is None else torch.cat([whole[a:b] for a, b in shard.ranges])

    def summed(self) -> dict[tuple[int, str, str], torch.Tensor]:
        """Return gradients after the reduction, in the processes that update them."""
        final = dict(self.gradients)
        for group in {one for held in self.held for one in held.shared}:
            total = sum(self.gradients[tuple(reference)] for reference in group.references)
            for reference in group.references:
                final[tuple(reference)] = total
                if group.owner not in (None, reference.process):
                    del final[tuple(reference)]
        return final


@given(plans())
def test_the_updating_process_has_the_full_gradient(plan: Plan) -> None:
    case = Case(plan)
    for (number, stage, name), gradient in case.summed().items():
        due = case.take(number, stage, name, case.totals[plan.by_id[stage].module, name])
        assert torch.equal(gradient, due), (number, stage, name)


@given(plans())
def test_every_element_is_counted_and_written_once(plan: Plan) -> None:
    case = Case(plan)
    final = case.summed()
    for what in ("in_grad_norm", "saves"):
        times = {key: torch.zeros_like(total) for key, total in case.totals.items()}
        for number, held in enumerate(case.held):
            for stage, name in getattr(held, what):
                module = plan.by_id[stage].module
                shard_spec = case.shard_specs[module]
                shard = shard_spec.shard(name, place_of(case.processes, number, shard_spec))
                ranges = ((0, None),) if shard is None else shard.ranges
                for start, stop in ranges:
                    times[module, name][start:stop] += 1
                if what == "in_grad_norm":  # in the process with the sum
                    assert (number, stage, name) in final
        for key, found in times.items():
            assert (found == 1).all(), (what, key, found)


@given(plans())
def test_reduction_groups_agree_on_parameter_order(plan: Plan) -> None:
    case = Case(plan)
    every = reduction_groups(case.held)
    assert list(every) == sorted(set(every))
    sharers = Counter(
        reference for one in {one for held in case.held for one in held.shared}
        for reference in one.references
    )
    assert not sharers or max(sharers.values()) == 1
    for reduction_group in every:
        known = [[one for one in case.held[p].shared if one.reduction_group == reduction_group]
                 for p in reduction_group.processes]  # fmt: skip
        assert known[0] and all(one == known[0] for one in known)
    for number, held in enumerate(case.held):
        for one in held.shared:
            assert number in one.reduction_group.processes and len(one.references) > 1
            assert one.reduction_group in every or one.reduction_group.processes == (number,)
            assert one.owner is None or one.owner in one.reduction_group.processes


@given(plans())
def test_shards_make_up_the_whole(plan: Plan) -> None:
    """Assemble them on the driver from every process that is not a replica."""
    case = Case(plan)
    for (module, name), total in case.totals.items():
        shard_spec, one = case.shard_specs[module], plan.module_stages(module)[0]
        count, whole = max(shard_spec.shards, one.tp), None
        for place in range(count):
            if not shard_spec.is_replica(name, place):
                shard = shard_spec.shard(name, place)
                own = total if shard is None else torch.cat([total[a:b] for a, b in shard.ranges])
                assert shard is None or len(parts_of(own, shard)) == len(shard.ranges)
                whole = shard_spec.add(whole, name, place, count, own)
        assert torch.equal(whole, total)


def test_owners_share_the_trained_parameters():
    """Check that frozen parameters, whatever their size, are not assigned."""
    stages = tuple(Stage("llm", 0, (0, 1), copy, copy, sharding="zero1") for copy in range(2))
    plan = Plan(ModuleGraph((ModuleNode("llm", (True,)),), ()), stages, 2)
    part = nn.Sequential(nn.Linear(8, 8), nn.Linear(2, 2), nn.Linear(8, 8), nn.Linear(2, 2))
    for frozen in (part[0], part[2]):
        frozen.requires_grad_(False)
    spec = EncoderSpec("vision", LiveSource.of(part), num_blocks=1)
    sizes = parameter_sizes(spec)
    assert [sizes[f"module.{name}"] for name in ("0.weight", "1.weight", "1.bias")] == [0, 4, 2]
    owned = dict.fromkeys((StageId("llm", 0), StageId("llm", 0, 1)), sizes)
    held = parameter_ownership(Processes(plan), owned, {"llm": ShardSpec()})
    owners = {one.references[0].name: one.owner for one in held[0].shared}
    assert owners["module.1.weight"] != owners["module.3.weight"]


def test_processes_that_agree_on_moments_all_update_them():
    """Use two shards of a matrix, whose ZeRO-1 owners could be in different replicas."""
    stages = tuple(
        Stage("llm", 0, (0, 1), copy, copy, sharding="zero1", tp=2) for copy in range(2)
    )
    plan = Plan(ModuleGraph((ModuleNode("llm", (True,)),), ()), stages, 2)
    shards = {
        name: tuple(ParameterShard(1, (one,)) for one in edges(width, 2))
        for name, width in (("odd", 96), ("even", 512))
    }
    sizes = {"module.odd": 64 * 96, "module.even": 64 * 512}
    owned = dict.fromkeys((StageId("llm", 0), StageId("llm", 0, 1)), sizes)
    specs = {"llm": ShardSpec({"module": TensorPlan(2, shards=shards)})}
    owners = {}
    for name in ("adamw", "adamw_8bit"):
        held = parameter_ownership(Processes(plan), owned, specs, OptimizerConfig(name=name))
        owners[name] = {
            one.references[0].name for own in held for one in own.shared if one.owner is not None
        }
    assert owners == {"adamw": set(sizes), "adamw_8bit": {"module.even"}}


def test_the_driver_visits_a_shared_parameter_once(monkeypatch) -> None:
    """Check that the start time does not grow with the square of the replicas."""
    looked = []
    reduction_group = SharedParameter.reduction_group.fget

    def counted(parameter: SharedParameter):
        looked.append(parameter)
        return reduction_group(parameter)

    monkeypatch.setattr(SharedParameter, "reduction_group", property(counted))
    holders = tuple(ParameterReference(n, StageId("llm", 0, n), "weight") for n in range(64))
    shared = SharedParameter(holders)
    every = [ParameterOwnership((shared,), frozenset(), frozenset()) for _ in holders]
    (group,) = reduction_groups(every)
    assert group.processes == tuple(range(64)) and len(looked) == 1
