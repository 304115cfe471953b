"""Section on kernels against float64.

Covers every mask pattern, head dims, dtypes, softcap, grouped queries, split rows, random segment
tables, merged parts of keys, and the loss. Nothing is timed, so several processes share the cases
and compile kernels at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.attention_case import BOUNDS, Case, errors, part_errors
from benchmarks.gpu.device import Device, relative_error
from benchmarks.gpu.every_mask import every_pattern, table
from benchmarks.gpu.record import Record

# Lengths other than multiples of a block, one below and one above several blocks.
SHORT, LONG = 283, 1000
LONGEST = 4352
HEAD_DIMS = (32, 64, 72, 80, 96, 128, 192, 256)
SINGLE_HEAD_DIMS = (32, 64, 80, 128, 256)
SEEDS = 12
# More processors than blocks: rows are split, and their parts merged.
PROCESSORS = 512
LOSS_BOUND = 1e-5


class WrongError(AssertionError):
    """Error for a result that differs from float64 by more than its dtype explains."""


class Check(NamedTuple):
    """Comparison with float64."""

    name: str
    find: Callable[[], Mapping[str, float]]
    bound: float


def run(device: Device, record: Record, share: tuple[int, int]) -> None:
    """Run this process's share of the checks."""
    number, count = share
    for check in list(checks(device))[number::count]:
        record.part(check.name, partial(_evaluate, check))


def _evaluate(check: Check) -> Mapping[str, Any]:
    found = check.find()
    largest = max(found.values())
    if not largest <= check.bound:  # also fails for NaN
        raise WrongError(f"{largest:.3g} of the norm, at most {check.bound:g}: {dict(found)}")
    return {"largest": f"{largest:.2e}", "bound": check.bound}


def checks(device: Device) -> Iterator[Check]:
    """Yield all checks; on a CPU a few of each kind, as they run in an interpreter."""
    yield from device.choose(list, lambda found: list(found)[:2])(_patterns(device))
    yield from device.choose(list, lambda found: list(found)[:1])(_head_dims(device))
    yield from device.choose(list, lambda found: list(found)[:1])(_tables(device))
    yield from _parts(device)
    yield _loss(device)


def _check(device: Device, name: str, *cases: Case) -> Check:
    def find() -> Mapping[str, float]:
        found: dict[str, float] = {}
        for case in cases:
            for key, error in errors(case, device.kind).items():
                # A maximum would lose NaN.
                worse = key not in found or not error <= found[key]
                found[key] = error if worse else found[key]
        return found

    return Check(name, find, BOUNDS[cases[0].dtype])


def _patterns(device: Device) -> Iterator[Check]:
    length, short = device.choose((LONG, SHORT), (57, 40))
    for pattern, build in every_pattern(length, seed=1).items():
        mask, small = build(), every_pattern(short, seed=2)[pattern]()
        whole = Case((mask, mask), device.choose((4, 2), (1, 1)), device.choose(128, 32),
                     "bfloat16", processors=1)  # fmt: skip
        split = Case((mask,), device.choose((4, 1), (1, 1)), device.choose(128, 32), "bfloat16",
                     processors=device.choose(PROCESSORS, 16))  # fmt: skip
        yield _check(device, f"bf16 {pattern}", whole, split)
        single = Case((small,), (2, 1), device.choose(64, 32), processors=PROCESSORS)
        yield _check(device, f"fp32 {pattern}", single)


def _head_dims(device: Device) -> Iterator[Check]:
    length = device.choose(SHORT, 40)
    mask = every_pattern(length)["own_image"]()
    for dtype, head_dims in (
        ("bfloat16", HEAD_DIMS), ("float32", SINGLE_HEAD_DIMS), ("float16", (128,)),
    ):
        for head_dim in head_dims:
            for softcap in (None, 20.0) if head_dim in (64, 128, 256) else (None,):
                name = f"{dtype} head dim {head_dim}" + (" softcap" if softcap else "")
                yield _check(device, name, Case((mask,), (2, 1), head_dim, dtype, softcap=softcap))
    mask = every_pattern(device.choose(LONGEST, 40), seed=1)["own_image_window"]()
    yield _check(device, "bf16 long", Case((mask,), (1, 1), 128, "bfloat16"))


def _tables(device: Device) -> Iterator[Check]:
    for seed in range(SEEDS):
        mask = table(seed, 57 + 31 * seed, 300 - 17 * seed)
        case = Case((mask,), (2, 1), device.choose(64, 32), processors=PROCESSORS, seed=seed)
        yield _check(device, f"fp32 random table {seed}", case)


def _parts(device: Device) -> Iterator[Check]:
    length = device.choose(LONG, 40)
    for pattern in device.choose(("mp_isolated", "own_image_window", "cross"), ("cross",)):
        mask = every_pattern(length)[pattern]()
        case = Case((mask,), (2, 1), device.choose(64, 32))
        cut = mask.n_keys // 3
        yield Check(f"fp32 parts of keys merged, {pattern}",
                    partial(part_errors, case, device.kind, cut), BOUNDS["float32"])  # fmt: skip


def _loss(device: Device) -> Check:
    from raymm.kernels.cross_entropy import token_cross_entropy_sum

    def find() -> Mapping[str, float]:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(device.choose(2048, 8), device.choose(32000, 50), generator=generator)
        targets = torch.randint(logits.shape[1], logits.shape[:1], generator=generator)
        targets = targets.to(device.torch)
        found = {}
        leaves = [logits.to(device.torch, dtype, copy=True).requires_grad_()
                  for dtype in (torch.float32, torch.float64)]  # fmt: skip
        loss = token_cross_entropy_sum(leaves[0], targets)
        exact = torch.nn.functional.cross_entropy(leaves[1], targets, reduction="sum")
        for value in (loss, exact):
            value.backward()
        found["loss"] = relative_error(loss, exact)
        assert leaves[0].grad is not None and leaves[1].grad is not None
        found["gradient"] = relative_error(leaves[0].grad, leaves[1].grad)
        return found

    return Check("fp32 cross entropy", find, LOSS_BOUND)
