"""Sums of gradients over processes, started during the backward, over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.optimizer.gradient_reduction import (
    GradientReduction,
    ParameterOwnership,
    ParameterReference,
    SharedParameter,
)
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.scheduler.plan.stage import StageId
from tests.support.fork_server import run_processes

PROCESSES = 3
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "unused")


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    made.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return made


def data(process: int, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * step + process)
    return torch.randn(4, 5, generator=g)


def shared(stages: dict[int, list[str]], owner: bool) -> list[SharedParameter]:
    """Return every parameter of the model, held by these stages of every process."""
    references = {
        name: tuple(
            ParameterReference(p, stage, name) for p, held in stages.items() for stage in held
        )
        for name in NAMES
    }
    return [
        SharedParameter(references[name], number % PROCESSES if owner else None)
        for number, name in enumerate(NAMES)
    ]


def _overlap(rank: int) -> None:
    """Start buckets during the last backward; a process without one joins at the end."""
    group = dist.new_group(list(range(PROCESSES)))
    whole = shared({p: [StageId("a", 0)] for p in range(PROCESSES)}, owner=False)
    mine = model()
    parameters = {(StageId("a", 0), name): p for name, p in mine.named_parameters()}
    reduction = GradientReduction(
        rank, parameters, whole, {whole[0].reduction_group: group}, limit=64
    )
    (reduction_group,) = reduction._reduction_groups
    assert len(reduction_group.buckets) > 2
    for step in range(3):
        takes_part = not (rank == 1 and step == 1)
        reduction.expect([StageId("a", 0)] if takes_part else [])
        reduction.begin((StageId("a", 0),))
        if takes_part:
            (mine(data(rank, 10 + step)).square().sum()).backward()
            assert reduction_group.started == 0  # not the last one
            reduction.last_backward(StageId("a", 0))
            started = []
            out = mine(data(rank, step))
            mine[0].weight.register_hook(
                lambda g, seen=started: seen.append(reduction_group.started)
            )
            out.square().sum().backward()
            # The unused parameter never gets a gradient: later ones wait for the end.
            assert started == [0] and reduction_group.started == 0
            reduction.finished(StageId("a", 0))
            assert reduction_group.started == len(reduction_group.buckets)
        reduction.wait()
        due = model()
        for process in range(PROCESSES):
            if not (process == 1 and step == 1):
                for number in (10 + step, step):
                    due(data(process, number)).square().sum().backward()
        absent = {id(parameter): float(flag) for parameter, flag in reduction.perhaps_absent}
        assert not mine.unused.grad.any() and absent[id(mine.unused)] == 1.0
        # A process whose last backward was on another process gets its gradient from the others.
        assert all(absent.get(id(p), 0.0) == 0.0 for p in mine.parameters() if p is not mine.unused)
        for name, p in due.named_parameters():
            if name != "unused":
                torch.testing.assert_close(mine.get_parameter(name).grad, p.grad)
        mine.zero_grad()


def _early(rank: int) -> None:
    """Check that the last layer's sum starts before the first layer's gradient.

    All parameters are used here.
    """
    group = dist.new_group(list(range(PROCESSES)))
    whole = shared({p: [StageId("a", 0)] for p in range(PROCESSES)}, owner=False)[:-1]
    mine = model()
    del mine.unused
    parameters = {(StageId("a", 0), name): p for name, p in mine.named_parameters()}
    reduction = GradientReduction(
        rank, parameters, whole, {whole[0].reduction_group: group}, limit=16
    )
    (reduction_group,) = reduction._reduction_groups
    seen = []
    mine[0].weight.register_hook(lambda g: seen.append(reduction_group.started))
    reduction.expect([StageId("a", 0)])
    reduction.begin((StageId("a", 0),))
    reduction.last_backward(StageId("a", 0))
    mine(data(rank, 0)).square().sum().backward()
    assert seen[0] >= 2, seen
    reduction.finished(StageId("a", 0))
    reduction.wait()


def _training(rank: int) -> None:
    """Train replicas on one process, of stages that end at different times.

    The optimizer state of every parameter is at all owners, or at one. Compares the parameters with
    one process after three steps.
    """
    config = OptimizerConfig(lr=0.1, eps=1e-5, max_grad_norm=0.5, no_decay=())
    stages = {
        0: [StageId("a", 0), StageId("a", 0, 1)],
        1: [StageId("a", 0, 2)],
        2: [StageId("a", 0, 3)],
    }
    for owner in (False, True):
        whole = shared(stages, owner)
        group = dist.new_group(list(range(PROCESSES)))
        copies = {stage: model() for stage in stages[rank]}
        parameters = {
            (stage, name): p for stage, one in copies.items() for name, p in one.named_parameters()
        }
        first = frozenset(
            (h.stage, h.name) for one in whole for h in one.references[:1]
            if one.owner is None and h.process == rank
        ) | frozenset(
            (stages[rank][0], one.references[0].name) for one in whole if one.owner == rank
        )
        optimizer = RankOptimizer(
            rank,
            parameters,
            config,
            ParameterOwnership(tuple(whole), first),
            {whole[0].reduction_group: group},
            torch.device("cpu"),
        )
        kept = {name for _, name in optimizer.updated}
        assert kept == (set(NAMES[rank::PROCESSES]) if owner else set(NAMES))
        reference = model()
        due = torch.optim.AdamW(reference.parameters(), lr=0.1, eps=1e-5, weight_decay=0.01)
        numbers = {stage: n for n, stage in enumerate(s for held in stages.values() for s in held)}
        for step in range(3):
            optimizer.reduction.expect(copies)
            for stage, one in copies.items():
                optimizer.reduction.last_backward(stage)
                one(data(numbers[stage], step)).square().sum().backward()
                optimizer.reduction.finished(stage)
            optimizer.reduction.wait()
            optimizer.clip()
            optimizer.step()
            norm = optimizer.finish().grad_norm
            for number in numbers.values():
                reference(data(number, step)).square().sum().backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            assert norm == pytest.approx(float(expected), rel=1e-5)
            due.step()
            due.zero_grad()
            for one in copies.values():
                for name, p in reference.named_parameters():
                    torch.testing.assert_close(one.get_parameter(name), p)
            assert all(p.grad is None for p in parameters.values())


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    _overlap(rank)
    _early(rank)
    _training(rank)
    dist.barrier()
    dist.destroy_process_group()


def test_processes(tmp_path):
    """Fail if an assertion in any process fails."""
    run_processes(_run, (str(tmp_path / "store"),), PROCESSES)
