"""Optimizer state of a model's layers, for the memory of plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.optimizer.adamw_8bit import BLOCK, is_quantised
from raymm.actors.optimizer.bf16_parameters import products_of
from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.optimizer_config import (
    ADAMW_8BIT,
    FP32,
    MASTER,
    MUON,
    OptimizerConfig,
    UpdateRule,
)
from raymm.actors.optimizer.updates import matrices_of
from raymm.model.model import Model
from raymm.scheduler.costs.layer_costs import MOMENTS, CostProfile

_FP32_BYTES = 4
# One byte per element, and a scale per block.
_MOMENT_8BIT = (1 + _FP32_BYTES / BLOCK) / _FP32_BYTES


def with_optimizer(
    profile: CostProfile, model: Model, config: OptimizerConfig
) -> CostProfile:
    """Return a profile whose layers have the optimizer state of their trained parameters."""
    modules = {}
    for name, layers in profile.modules.items():
        spec = model.spec(name)
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in layers]
        projector = getattr(spec, "projector", None)
        skeletons = [("module.", spec.source.skeleton())]
        if projector is not None:
            skeletons.append(("projector.", projector.skeleton()))
        for prefix, skeleton in skeletons:
            rule, matrices = config.rule_of(name, prefix), matrices_of([skeleton])
            products = products_of([skeleton])
            for layer, parameter in parameter_layers(skeleton, spec.num_blocks):
                if parameter.requires_grad:
                    layer_sums = sums[layer if prefix == "module." else len(layers) - 1]
                    layer_sums[0] += parameter.numel()
                    layer_sums[1] += parameter.numel() * _moments(rule, parameter, matrices)
                    layer_sums[1] += parameter.numel() * (config.ema is not None)
                    if id(parameter) in products:
                        layer_sums[1] += parameter.numel() * (rule.parameters == MASTER)
                        layer_sums[2 if rule.parameters != FP32 else 3] += parameter.numel()
        modules[name] = tuple(
            replace(
                cost, moments=moment_sum / count, in_bf16=halved / count, copied=copied / count
            ) if count else cost
            for cost, (count, moment_sum, halved, copied) in zip(layers, sums, strict=True)
        )
    return replace(profile, modules=modules)


def _moments(rule: UpdateRule, parameter: nn.Parameter, matrices: set[int]) -> float:
    if rule.name == ADAMW_8BIT and is_quantised(parameter.numel()):
        return MOMENTS * _MOMENT_8BIT
    if rule.is_custom:
        return optimizer_traits("optimizer.name", rule).tensors
    return 1.0 if rule.name == MUON and id(parameter) in matrices else float(MOMENTS)


def parameter_layers(module: nn.Module, count: int) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield the layer of every parameter. Parameters before the blocks belong to the first layer,
    those after them to the last, and a head that is also an embedding to both."""
    path = find_blocks(module)
    if path is None or count == 1:
        yield from ((0, parameter) for parameter in module.parameters())
        return
    get = getattr(module, "get_output_embeddings", None)
    head = get() if get else None
    last = {id(p) for p in head.parameters()} if head is not None else set()
    past_blocks, first = False, set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(path + "."):
            past_blocks = True
            yield int(name.removeprefix(path + ".").split(".")[0]), parameter
        elif past_blocks or id(parameter) in last and id(parameter) in first:
            yield count - 1, parameter
        elif id(parameter) in last and not _is_embedding(module, parameter):
            yield count - 1, parameter
        else:
            first.add(id(parameter))
            yield 0, parameter


def _is_embedding(module: nn.Module, parameter: nn.Parameter) -> bool:
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding))
    return any(m.weight is parameter for m in embeddings)
