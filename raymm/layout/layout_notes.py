"""Say which numbers of a run depend on its layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import ADAMW_8BIT, STOCHASTIC, OptimizerConfig
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.scheduler.plan.plan import Plan


def layout_notes(
    model: MultimodalModule | WholeModel, plan: Plan, optimizer: OptimizerConfig
) -> Iterator[str]:
    """Yield one line for each module whose training differs from that of one process.

    Args:
        model: the description.
        plan: what runs where.
        optimizer: what updates it.
    """
    for node in plan.graph.nodes:
        stage = plan.module_stages(node.name)[0]
        degrees = {"tp": stage.tp, "cp": stage.cp, "fsdp": max(stage.shards, stage.fsdp)}
        shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
        spec: Any = model.spec(node.name)
        sources = [spec.source, getattr(spec, "projector", None)]
        parts = [source.skeleton() for source in sources if source is not None]
        if shown and any(map(_drops, parts)):
            yield (
                f"note: dropout of {node.name} draws other masks with {shown} than in one process: "
                "losses are alike, not equal, and a run that goes on under another layout draws "
                "others"
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


def _drops(module: nn.Module) -> bool:
    """Whether a forward in training drops values: layers for it, rates of attention that its
    modules keep, and those of adapters."""
    return any(
        child.training and (
            isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0
            or any(
                "drop" in name and isinstance(value, float) and value > 0
                or isinstance(value, LoraConfig) and value.dropout > 0
                for name, value in vars(child).items()
            )
        )
        for child in module.modules()
    )
