"""Run Triton attention beside the float64 oracle, in a process of its own.

The interpreter must be chosen before anything imports Triton, which other tests do; and an
access out of bounds would end the process, not the tests. Where there is a GPU the same cases
run on it, compiled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raymm.kernels.mask.mask import AttentionMask

NAMES = ("out", "lse", "query", "key", "value")


@dataclass(frozen=True)
class Case:
    """A call of `triton_attention`.

    Attributes:
        masks: one per sequence of the batch; equal objects stay one object.
        blocks: (block_q, block_k) of every kernel instead of the table's; multiples of 16.
    """

    masks: tuple[AttentionMask, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 32
    dtype: str = "float32"
    scale: float | None = None
    softcap: float | None = None
    processors: int | None = None
    blocks: tuple[int, int] | None = None
    seed: int = 0


@contextmanager
def worker() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets, unless there is a GPU."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
        yield pool


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _start() -> None:
    if device() == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def inputs(case: Case) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, normally distributed."""
    generator = torch.Generator().manual_seed(case.seed)
    n_queries, n_keys = case.masks[0].shape
    shapes = [
        (case.heads[0], n_queries),
        *[(case.heads[1], n_keys)] * 2,
        (case.heads[0], n_queries),
    ]
    dtype = getattr(torch, case.dtype)
    return [
        torch.randn(len(case.masks), *shape, case.head_dim, generator=generator).to(dtype)
        for shape in shapes
    ]


def run(case: Case) -> list[torch.Tensor]:
    """Output, LSE and the three gradients, on the CPU."""
    from raymm.kernels.flash.gpu.attention import triton_attention

    *leaves, grad_out = (t.to(device()) for t in inputs(case))
    leaves = [t.requires_grad_() for t in leaves]
    out, lse = triton_attention(*leaves, case.masks, **options(case))
    grads = torch.autograd.grad(out, leaves, grad_out)
    return [t.detach().cpu() for t in (out, lse, *grads)]


def options(case: Case) -> dict[str, Any]:
    """Keyword arguments of the call."""
    from raymm.kernels.flash.gpu.launch_configs import AttentionConfig, KernelConfig

    config = None
    if case.blocks is not None:
        kernel = KernelConfig(*case.blocks, warps=4, stages=1, precision="ieee")
        config = AttentionConfig(kernel, kernel, kernel)
    return {
        "scale": case.scale,
        "softcap": case.softcap,
        "processors": case.processors,
        "config": config,
    }


def expected(case: Case) -> list[torch.Tensor]:
    """The same by the oracle, in float64."""
    from raymm.kernels.flash.reference import reference_attention

    *leaves, grad_out = inputs(case)
    leaves = [t.double().requires_grad_() for t in leaves]
    visible = torch.stack([mask.dense() for mask in case.masks])
    out, lse = reference_attention(*leaves, visible, scale=case.scale, softcap=case.softcap)
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    return [t.detach() for t in (out, lse, *grads)]


def errors(case: Case, found: list[torch.Tensor] | None = None) -> dict[str, float]:
    """Norm of the difference over norm of the oracle's tensor, per tensor, of what `run` has found
    or finds; infinite LSE must be the same ones, and rows of zeros exactly zero (asserted)."""
    found = dict(zip(NAMES, found or run(case), strict=True))
    wanted = dict(zip(NAMES, expected(case), strict=True))
    unseen = torch.isneginf(wanted["lse"])
    assert torch.equal(torch.isneginf(found["lse"]), unseen)
    assert not found["out"][unseen].any() and not found["query"][unseen].any()
    unread = (wanted["value"] == 0).all(-1)
    assert not found["key"][unread].any() and not found["value"][unread].any()
    found["lse"], wanted["lse"] = found["lse"][~unseen], wanted["lse"][~unseen]
    return {name: _error(found[name].double(), wanted[name]) for name in NAMES}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Where the oracle's tensor is zero (gradients of scores of a single key), the
    largest element."""
    assert found.shape == wanted.shape and found.isfinite().all()
    norm = wanted.norm().item()
    if norm > 1e-9:
        return (found - wanted).norm().item() / norm
    return found.abs().max().item() if found.numel() else 0.0
