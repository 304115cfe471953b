"""Collectives, operators between replicated and sharded tensors, and the vocabulary loss.

Run in gloo processes and in threads; the oracles are dense.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.kernels.collectives.tensor_group import TensorGroup, ThreadGroup, thread_groups
from raymm.kernels.collectives.tensor_parallel import (
    copy_to_shards,
    gather_from_shards,
    reduce_from_shards,
    split_to_shards,
)
from raymm.kernels.cross_entropy import (
    token_cross_entropy_sum,
    vocabulary_parallel_cross_entropy_sum,
)
from tests.support.rank_processes import RankProcesses

RAGGED = (3, 1, 4)


def in_threads(function: Callable[..., Any], size: int, **kwargs: Any) -> list[Any]:
    """Return the results of ``function(group=..., **kwargs)`` in each thread of a group."""
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def work(group: ThreadGroup) -> None:
        try:
            results[group.rank] = function(group=group, **kwargs)
        except Exception as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=work, args=(g,)) for g in thread_groups(size, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


def as_tensor_group(group: Any) -> TensorGroup:
    return group if isinstance(group, TensorGroup) else TensorGroup(group)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def two_layers(group: Any, columns: tuple[int, ...], gathered: bool) -> tuple[torch.Tensor, ...]:
    """Return x -> tanh(x A) -> (.) B, with A in columns and B in rows, and x used again."""
    group = as_tensor_group(group)
    inner = sum(columns)
    start = sum(columns[: group.rank])
    own = slice(start, start + columns[group.rank])
    x = randn(2, 3, 4, seed=1).requires_grad_()
    first = randn(4, inner, seed=2)[:, own].clone().requires_grad_()
    second = randn(inner, 5, seed=3)[own].clone().requires_grad_()
    hidden = copy_to_shards(x * 1, group) @ first
    if gathered:
        hidden = gather_from_shards(hidden, group, columns).softmax(-1)
        hidden = split_to_shards(hidden, group, columns)
    else:
        hidden = hidden.tanh()
    out = reduce_from_shards(hidden @ second, group)
    loss = (out * randn(2, 3, 5, seed=4)).sum() + (x**2).sum()
    loss.backward()
    return out.detach(), x.grad, first.grad, second.grad


def dense_layers(inner: int, gathered: bool) -> tuple[torch.Tensor, ...]:
    x = randn(2, 3, 4, seed=1).requires_grad_()
    first, second = randn(4, inner, seed=2).requires_grad_(), randn(inner, 5, seed=3)
    second.requires_grad_()
    hidden = x @ first
    out = (hidden.softmax(-1) if gathered else hidden.tanh()) @ second
    ((out * randn(2, 3, 5, seed=4)).sum() + (x**2).sum()).backward()
    return out.detach(), x.grad, first.grad, second.grad


def check_layers(results: Any, columns: tuple[int, ...], gathered: bool) -> None:
    out, x, first, second = dense_layers(sum(columns), gathered)
    for found in results:
        close(found[0], out)
        close(found[1], x)
        assert torch.equal(found[1], results[0][1])
    close(torch.cat([found[2] for found in results], 1), first)
    close(torch.cat([found[3] for found in results]), second)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_in_processes(processes: RankProcesses, gathered: bool) -> None:
    results = processes.run(two_layers, 3, columns=RAGGED, gathered=gathered)
    check_layers(results, RAGGED, gathered)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.booleans())
def test_layers_with_any_shares(columns: tuple[int, ...], gathered: bool) -> None:
    check_layers(
        in_threads(two_layers, len(columns), columns=columns, gathered=gathered), columns, gathered
    )


def test_shared_gradients_are_not_modified() -> None:
    """Add two tensors, which get the same gradient object."""

    def both(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        (copy_to_shards(x * 1, group) + y * 1).sum().backward()
        return x.grad, y.grad

    for summed, alone in in_threads(both, 2):
        assert torch.equal(summed, torch.full((3,), 2.0))
        assert torch.equal(alone, torch.ones(3))


def test_nothing_is_summed_without_gradients() -> None:
    group = thread_groups(2)[0]  # the other thread never arrives
    x = torch.ones(2)
    assert copy_to_shards(x, group) is x
    with torch.no_grad():
        assert copy_to_shards(x.requires_grad_(), group) is x


def share_of_loss(
    group: Any, widths: tuple[int, ...], tokens: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    group = as_tensor_group(group)
    logits, targets = loss_inputs(sum(widths), tokens, scale, dtype)
    start = sum(widths[: group.rank])
    own = logits[:, start : start + widths[group.rank]].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy_sum(own, targets, start, group)
    (loss * 0.5).backward()
    return loss.detach(), own.grad


def loss_inputs(
    width: int, tokens: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, width, generator=generator) * scale
    return logits.to(dtype), torch.randint(0, width, (tokens,), generator=generator)


def check_loss(
    results: Any, widths: tuple[int, ...], tokens: int, scale: float, dtype: torch.dtype
) -> None:
    logits, targets = loss_inputs(sum(widths), tokens, scale, dtype)
    logits = logits.double().requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum")
    (expected * 0.5).backward()
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    for loss, _ in results:
        assert loss.dtype == torch.float32 and loss.shape == ()
        assert torch.equal(loss, results[0][0])
        assert abs(loss - expected) <= 1e-6 * (1 + abs(expected))
    gradient = torch.cat([own for _, own in results], 1)
    assert gradient.dtype == dtype
    assert (gradient - logits.grad).norm() <= tolerance * logits.grad.norm() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [7, 0])
def test_loss_in_processes(processes: RankProcesses, tokens: int, dtype: torch.dtype) -> None:
    case = {"widths": (5, 3, 4), "tokens": tokens, "scale": 3.0, "dtype": dtype}
    check_loss(processes.run(share_of_loss, 3, **case), **case)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any).map(tuple),
    st.integers(0, 9),
    st.sampled_from([0.1, 1.0, 100.0]),
)
def test_loss_with_any_shares(widths: tuple[int, ...], tokens: int, scale: float) -> None:
    case = {"widths": widths, "tokens": tokens, "scale": scale, "dtype": torch.float32}
    check_loss(in_threads(share_of_loss, len(widths), **case), **case)


def test_loss_of_one_member_is_the_plain_one() -> None:
    (group,) = thread_groups(1)
    logits, targets = loss_inputs(11, 6, 2.0, torch.float32)
    found = vocabulary_parallel_cross_entropy_sum(logits, targets, 0, group)
    torch.testing.assert_close(found, token_cross_entropy_sum(logits, targets))


def test_tokens_that_a_share_hides_altogether() -> None:
    """Set logits to minus infinity, as a head may do for padding columns."""

    def share(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        value = float("-inf") if group.rank else 1.0
        own = torch.full((2, 3), value, requires_grad=True)
        targets = torch.tensor([0, 2])
        loss = vocabulary_parallel_cross_entropy_sum(own, targets, 3 * group.rank, group)
        loss.backward()
        return loss.detach(), own.grad

    (loss, gradient), (same, hidden) = in_threads(share, 2)
    assert torch.equal(loss, same)
    torch.testing.assert_close(loss, 2 * torch.tensor(3.0).log())
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 1, 1], [1, 1, -2]]) / 3)
    assert torch.equal(hidden, torch.zeros(2, 3))
