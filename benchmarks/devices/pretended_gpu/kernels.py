"""CPU replacements for Triton's attention and NCCL on the pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.devices.pretended_gpu.device import PretendedTensor, values, waited
from raymm.actors.executor import channels
from raymm.actors.rank import rendezvous
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.flash.gpu import attention as gpu_attention
from raymm.kernels.flash.gpu.launch_configs import DEFAULT_LAUNCH, Launch


class _Attention(torch.autograd.Function):
    """Attention that reads the tables of the kernels and computes their results on the CPU."""

    @staticmethod
    def forward(ctx: Any, query, key, value, plan, masks, scale, softcap):
        _ = plan and plan.forward
        ctx.plan = plan
        ctx.inputs = [values(t).detach().requires_grad_() for t in (query, key, value)]
        with torch.enable_grad():
            ctx.out, lse = cpu_attention(*ctx.inputs, masks, scale=scale, softcap=softcap)
        lse = PretendedTensor(lse.detach())
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return PretendedTensor(ctx.out.detach()), lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.plan and (ctx.plan.backward_query, ctx.plan.backward_key)
        grad = values(grads[0]).contiguous()
        found = torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True)
        return (*map(PretendedTensor, found), None, None, None, None)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Any, *,
    scale: float | None = None, softcap: float | None = None, launch: Launch = DEFAULT_LAUNCH,
) -> Any:  # fmt: skip
    gpu_attention.check_operands(query, key, value, masks)
    plan = gpu_attention._plan((query, key, value), masks, softcap, launch)
    return _Attention.apply(query, key, value, plan, masks, scale, softcap)


class _Work:
    """NCCL work handle: a wait without a timeout blocks the device, one with a timeout the host."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, *timeout: Any) -> None:
        """Record the wait as NCCL would, and wait for the CPU's result."""
        if timeout:
            waited("wait for a message")
        self._work.wait()

    def is_completed(self) -> bool:
        """Return True if the work is done, without waiting."""
        return self._work.is_completed()


def _as_nccl(operation: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        held = [values(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        work = operation(*held, **options)
        return work if values(tensors[0]) is tensors[0] else _Work(work)

    return run


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Replace Triton's attention by the CPU's operator, and NCCL process groups by gloo.

    The operator reads the tables that Triton's kernels would read.
    """
    init, new_group = dist.init_process_group, dist.new_group

    def init_gloo(backend: str, **options: Any) -> None:
        init("gloo", **options)

    def new_gloo(ranks: Any, *, timeout: Any, **_: Any) -> Any:
        return new_group(ranks, timeout=timeout)

    nccl = SimpleNamespace(Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))
    with ExitStack() as stack:
        stack.enter_context(patch.object(gpu_attention, "triton_attention", _attention))
        stack.enter_context(patch.object(dist, "init_process_group", init_gloo))
        stack.enter_context(patch.object(dist, "new_group", new_gloo))
        stack.enter_context(patch.object(dist, "ProcessGroupNCCL", nccl, create=True))
        for module, name in (
            (dist, "isend"), (dist, "irecv"), (channels, "send_to"), (channels, "receive_from"),
            (rendezvous, "send_to"), (rendezvous, "receive_from"),
        ):
            stack.enter_context(patch.object(module, name, _as_nccl(getattr(module, name))))
        yield
