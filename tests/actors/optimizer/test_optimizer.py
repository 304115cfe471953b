"""The optimizer of one process.

``test_gradient_reduction`` and the parity suite cover several processes.
"""

import math

import pytest
import torch
from torch import nn

from raymm.actors.optimizer.finite import not_finite
from raymm.actors.optimizer.gradient_reduction import (
    GradientReduction,
    ParameterOwnership,
    ParameterReference,
    SharedParameter,
)
from raymm.actors.optimizer.optimizer import RankOptimizer, Update
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.scheduler.plan.stage import StageId


def optimizer_of(*gradients: tuple[float | None, ...]) -> RankOptimizer:
    """Return an optimizer with one shared parameter per tuple, and one owner per entry."""
    parameters, shared = {}, []
    for number, values in enumerate(gradients):
        references = tuple(
            ParameterReference(0, StageId("vision", 0, k), str(number)) for k in range(len(values))
        )
        for (_, *place), value in zip(references, values, strict=True):
            parameters[tuple(place)] = parameter = nn.Parameter(torch.ones(2))
            parameter.grad = None if value is None else torch.full((2,), value)
        shared.append(SharedParameter(references))
    firsts = frozenset((StageId("vision", 0, 0), str(n)) for n in range(len(gradients)))
    parameter_ownership = ParameterOwnership(tuple(shared), firsts, firsts)
    return RankOptimizer(
        0, parameters, OptimizerConfig(), parameter_ownership, {}, torch.device("cpu")
    )


def update(optimizer: RankOptimizer) -> Update:
    optimizer.clip()
    optimizer.step()
    return optimizer.finish()


def test_all_owners_get_the_sum_and_none_stays_none():
    optimizer = optimizer_of((1.0, 2.0), (None, 4.0, 1.0), (None, None))
    optimizer.reduction.wait()
    found = {key: p.grad for key, p in optimizer.parameters.items()}
    for (_, number), gradient in found.items():
        if number == "2":
            assert gradient is None
        else:
            assert gradient.tolist() == [3.0 if number == "0" else 5.0] * 2
    present = [g for g in found.values() if g is not None]
    assert len({g.data_ptr() for g in present}) == len(present)
    assert update(optimizer).grad_norm == pytest.approx((2 * 9 + 2 * 25) ** 0.5)  # each once
    assert all(p.equal(torch.ones(2)) == (key[1] == "2") for key, p in optimizer.parameters.items())


@pytest.mark.parametrize("limit", [1, 60, 10**6])
def test_buckets(limit):
    """Use mixed dtypes, a non-contiguous gradient, an empty one, one larger than a bucket."""
    parameters, shared, due = {}, [], []
    tensors = [
        torch.randn(5), torch.randn(3, 4).t(), torch.randn(2, 3).double(), torch.randn(0, 4),
        torch.randn(40), torch.randn(1).bfloat16(),
    ]
    for number, gradient in enumerate(tensors):
        references = tuple(ParameterReference(0, StageId("a", 0, k), str(number)) for k in (0, 1))
        shared.append(SharedParameter(references))
        for _, *place in references:
            parameters[tuple(place)] = parameter = nn.Parameter(torch.empty_like(gradient))
            parameter.grad = gradient.clone()
        due.append(gradient * 2)
    reduction = GradientReduction(0, parameters, shared, {}, limit)
    buckets = [
        bucket
        for reduction_group in reduction._reduction_groups
        for bucket in reduction_group.buckets
    ]
    for bucket in buckets:
        sizes = [member.parameters[0].nbytes for member in bucket.members]
        assert sum(sizes) <= limit or len(sizes) == 1 or sum(sizes) == max(sizes)
        assert len({member.parameters[0].dtype for member in bucket.members}) == 1
    assert sum(len(bucket.members) for bucket in buckets) == len(tensors)
    reduction.wait()
    for (_, number), parameter in parameters.items():
        assert torch.equal(parameter.grad, due[int(number)])
        assert parameter.grad.shape == parameter.shape


def test_alternating_owners_do_not_make_small_buckets():
    parameters = {(StageId("a", 0), str(n)): nn.Parameter(torch.ones(4)) for n in range(20)}
    shared = [
        SharedParameter(
            tuple(ParameterReference(p, StageId("a", 0), str(n)) for p in (0, 1)), owner=n % 2
        )
        for n in range(20)
    ]
    reduction = GradientReduction(0, parameters, shared, {})
    (reduction_group,) = reduction._reduction_groups
    assert [(bucket.owner, len(bucket.members)) for bucket in reduction_group.buckets] == [
        (1, 10),
        (0, 10),
    ]


def test_the_rate_follows_the_schedule_without_training():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    optimizer = RankOptimizer(0, {}, config, ParameterOwnership(), {}, torch.device("cpu"))
    rates = [update(optimizer).learning_rate for _ in range(5)]
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0]
    optimizer.load_state_tensors({}, 1)
    assert update(optimizer).learning_rate == 0.25


def one_parameter(gradient, config: OptimizerConfig) -> RankOptimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor(gradient)
    key = (StageId("a", 0), "w")
    parameter_ownership = ParameterOwnership((), frozenset({key}), frozenset({key}))
    return RankOptimizer(0, {key: parameter}, config, parameter_ownership, {}, torch.device("cpu"))


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize(
    ("gradient", "applied"),
    [
        ([3.0, 4.0], "always"), ([math.nan, 1.0], "never"), ([math.inf, 1.0], "never"),
        ([-math.inf, math.inf], "never"),
        # Finite, though squares overflow in fp32: AdamW could not store them without clipping.
        ([3e25, 4e25], "clipped"), ([3e38, 3e38], "clipped"),
    ],
)
def test_only_finite_gradients_are_applied(clipped, gradient, applied):
    config = OptimizerConfig(lr=0.1, weight_decay=0.0, max_grad_norm=1.0 if clipped else None)
    optimizer = one_parameter(gradient, config)
    ((key, parameter),) = optimizer.parameters.items()
    done = update(optimizer)
    norm = done.grad_norm
    ok = applied == "always" or clipped and applied == "clipped"
    assert (done.not_finite is None) == ok
    if ok:
        assert norm == pytest.approx(math.hypot(*gradient), rel=1e-6)
        assert done.learning_rate == 0.1 and not parameter.equal(torch.ones(2))
        state = optimizer.state_tensors()
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
        if clipped:
            expected = torch.tensor(gradient).double() / norm * 0.1  # beta 0.9
            assert state[*key, "exp_avg"].double().allclose(expected, rtol=1e-5)
    else:
        assert done.learning_rate is None and parameter.equal(torch.ones(2))
        assert optimizer.state_tensors() == {} and parameter.grad is None
        parameter.grad = torch.ones(2)  # the next step is an ordinary one
        done = update(optimizer)
        assert done.not_finite is None and done.learning_rate == 0.1


def test_a_non_finite_loss_skips_and_advances_the_schedule():
    optimizer = one_parameter([1.0, 1.0], OptimizerConfig(lr=1.0, warmup_steps=4))
    optimizer.observer.begin()
    optimizer.observer.loss(torch.tensor(math.inf))
    optimizer.observer.begin()  # also in a batch before the last one
    optimizer.observer.loss(torch.tensor(1.0))
    done = update(optimizer)
    assert math.isnan(done.grad_norm) and done.not_finite == [] and done.learning_rate is None
    optimizer.observer.begin()
    optimizer.observer.loss(torch.tensor(1.0))
    assert update(optimizer).learning_rate == 0.25  # the second step's rate


def test_uncounted_gradients_must_be_finite_too():
    parameters = {(StageId("a", 0), name): nn.Parameter(torch.ones(1)) for name in "xy"}
    for parameter in parameters.values():
        parameter.grad = torch.full((1,), 2.0)
    optimizer = RankOptimizer(
        0,
        parameters,
        OptimizerConfig(),
        ParameterOwnership((), frozenset({(StageId("a", 0), "x")})),
        {},
        torch.device("cpu"),
    )
    done = update(optimizer)
    assert done.grad_norm == 2.0 and done.not_finite is None
    for name, value in (("x", 2.0), ("y", math.nan)):
        parameters[StageId("a", 0), name].grad = torch.full((1,), value)
    done = update(optimizer)
    assert [(one.kind, one.stage, one.names) for one in done.not_finite] == [
        ("parameters", StageId("a", 0), ("y",))
    ]


def test_skipped_steps_restore_running_statistics():
    norm, frozen = nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()
    both = nn.ModuleList([norm, frozen])
    parameters = {(StageId("a", 0), name): p for name, p in norm.named_parameters()}
    optimizer = RankOptimizer(
        0, parameters, OptimizerConfig(), ParameterOwnership((), frozenset(parameters)), {},
        torch.device("cpu"), [both],
    )
    seen = []
    for rows in ([[1.0, 2.0], [3.0, 5.0]], [[math.nan, 1.0], [2.0, 3.0]], [[4.0, 4.0], [3.0, 1.0]]):
        optimizer.observer.begin()
        loss = norm(torch.tensor(rows)).square().sum()
        loss.backward()
        optimizer.observer.loss(loss)
        update(optimizer)
        seen.append({name: value.clone() for name, value in norm.named_buffers()})
    assert all(seen[0][name].equal(value) for name, value in seen[1].items())
    assert seen[2]["num_batches_tracked"] == 2 and seen[2]["running_mean"].isfinite().all()
    assert not seen[2]["running_mean"].equal(seen[1]["running_mean"])


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64,
])
def test_parameters_of_any_dtype_are_checked(dtype):
    """Check 8-bit types, which have no sums, and complex numbers."""
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])
    assert not_finite([("good", good.to(dtype))]) == []
    if dtype != torch.int64:
        (found,) = not_finite([("bad", bad.to(dtype))])
        assert found.startswith("bad (1 of ")


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_owner_of_a_parameter_has_its_fp32_master(process: int) -> None:
    """Use ZeRO-1; other processes have the bf16 values that the owner sends."""
    key, layer = (StageId("llm", 0), "module.weight"), nn.Linear(8, 8, bias=False)
    references = tuple(ParameterReference(number, *key) for number in (0, 1))
    ownership = ParameterOwnership((SharedParameter(references, owner=0),), frozenset({key}))
    optimizer = RankOptimizer(
        process, {key: layer.weight}, OptimizerConfig(parameters="bf16_master"), ownership, {},
        torch.device("cpu"), [layer],
    )
    (kept,) = optimizer.in_bf16.values()
    assert layer.weight.dtype == torch.bfloat16
    assert kept.wide.numel() == (64 if process == 0 else 0)
    assert [name for *_, name in optimizer.state_tensors()] == ["master"] * (process == 0)
