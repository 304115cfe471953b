"""Notes on the numbers of a run that depend on its layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from transformers import PretrainedConfig

from raymm.model.model import Model
from raymm.scheduler.plan.plan import Plan

# Attention implementations of transformers with the dropout masks of one process on any device.
_CUT_ATTENTION = ("eager",)


def layout_notes(
    model: Model, plan: Plan, device: str
) -> Iterator[str]:
    """Yield one line for each module that trains differently than in one process. On ``"cuda"``,
    attention kernels draw their own dropout masks."""
    for node in plan.graph.nodes:
        stage = plan.module_stages(node.name)[0]
        degrees = {"tp": stage.tp, "cp": stage.cp, "fsdp": max(stage.shards, stage.fsdp)}
        shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
        spec: Any = model.spec(node.name)
        sources = [spec.source, getattr(spec, "projector", None)]
        skeletons = [source.skeleton() for source in sources if source is not None]
        if device == "cuda" and shown and any(map(_drops_in_kernels, skeletons)):
            yield (
                f"note: with {shown}, attention kernels of {node.name} draw other dropout masks "
                "than in one process: losses are similar, not equal. For equal losses set "
                "attn_implementation of the model to eager"
            )
        replicas = len(plan.replicas(node.name))
        trained = [m for skeleton in skeletons for m in skeleton.modules() if m.training]
        if replicas > 1 and any(
            isinstance(m, _NormBase) and m.running_mean is not None for m in trained
        ):
            yield (
                f"note: each of the {replicas} replicas of {node.name} updates its running "
                "statistics (batch norm) with its own microbatches: training matches one process, "
                "but held-out losses use the statistics of each replica, and checkpoints store "
                "those of the first replica, which all replicas load on resume. For the statistics "
                f"of one process set dp of {node.name} to 1, or freeze it"
            )
        if replicas > 1 and any(isinstance(m, _SpectralNorm) for m in trained):
            yield (
                f"note: each of the {replicas} replicas of {node.name} updates the vectors of its "
                "spectral norms, which scale the weights, with its own microbatches: losses are "
                "similar to those of one process, not equal, also after a resume. For equal losses "
                f"set dp of {node.name} to 1, or freeze it"
            )


def _drops_in_kernels(module: nn.Module) -> bool:
    """Return True if attention drops values in training, in a kernel whose mask cannot be
    sharded."""
    configs: list[Any] = [
        child.config for child in module.modules()
        if child.training and isinstance(getattr(child, "config", None), PretrainedConfig)
    ]
    return any(
        "att" in name and "drop" in name and isinstance(value, float) and value > 0
        for config in configs if config._attn_implementation not in _CUT_ATTENTION
        for name, value in vars(config).items()
    )
