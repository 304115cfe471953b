"""Say which numbers of a run depend on its layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from transformers import PretrainedConfig

from raymm.actors.optimizer.optimizer_config import ADAMW_8BIT, STOCHASTIC, OptimizerConfig
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.scheduler.plan.plan import Plan

# Attention of transformers that draws its dropout masks as one process would.
_CUT_ATTENTION = ("eager",)


def layout_notes(
    model: MultimodalModule | WholeModel, plan: Plan, optimizer: OptimizerConfig, device: str
) -> Iterator[str]:
    """Yield one line for each module whose training differs from that of one process.

    Args:
        model: the description.
        plan: what runs where.
        optimizer: what updates it.
        device: ``"cpu"`` or ``"cuda"``, whose attention kernels make dropout masks by themselves.
    """
    for node in plan.graph.nodes:
        stage = plan.module_stages(node.name)[0]
        degrees = {"tp": stage.tp, "cp": stage.cp, "fsdp": max(stage.shards, stage.fsdp)}
        shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
        spec: Any = model.spec(node.name)
        sources = [spec.source, getattr(spec, "projector", None)]
        parts = [source.skeleton() for source in sources if source is not None]
        if device == "cuda" and shown and any(map(_drops_in_kernels, parts)):
            yield (
                f"note: attention of {node.name} draws other dropout masks with {shown} than in "
                "one process, as kernels on GPUs make them: losses are similar, not equal. For "
                "equal ones set attn_implementation of the model to eager"
            )
        replicas = len(plan.replicas(node.name))
        if replicas > 1 and any(map(_keeps_statistics, parts)):
            yield (
                f"note: each of the {replicas} replicas of {node.name} updates its running "
                "statistics (batch norm, spectral norm) with the microbatches that it has, and "
                "evaluates with them; checkpoints hold those of the first replica"
            )
        rule = optimizer.rule_of(node.name, "module.")
        is_trained, is_cut = any(node.trainable), max(degrees["tp"], degrees["fsdp"]) > 1
        if rule.parameters == STOCHASTIC and is_trained and is_cut:
            yield (
                f"note: bf16_stochastic rounds weights of {node.name} by other random numbers with "
                f"{shown} than in one process or under another layout"
            )
        if rule.name == ADAMW_8BIT and is_trained and is_cut:
            yield (
                f"note: adamw_8bit keeps moments of {node.name} in blocks of what each process has "
                f"({shown}), which round otherwise than those of one process or another layout"
            )


def _keeps_statistics(module: nn.Module) -> bool:
    """Return True if training forwards update buffers of norms."""
    return any(
        child.training and (
            isinstance(child, _NormBase) and child.running_mean is not None
            or isinstance(child, _SpectralNorm)
        )
        for child in module.modules()
    )


def _drops_in_kernels(module: nn.Module) -> bool:
    """Return True if attention drops values in training, in a kernel whose mask cannot be cut."""
    configs: list[Any] = [
        child.config for child in module.modules()
        if child.training and isinstance(getattr(child, "config", None), PretrainedConfig)
    ]
    return any(
        "att" in name and "drop" in name and isinstance(value, float) and value > 0
        for config in configs if config._attn_implementation not in _CUT_ATTENTION
        for name, value in vars(config).items()
    )
