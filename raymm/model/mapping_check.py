"""A multimodal model under a mapping: every encoder with its projector is a node, the language
model is the loss."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from raymm.actors.modules.node import NodeSpec
from raymm.actors.multiplexed.multimodal_nodes import encoder_node, language_node
from raymm.actors.quota import check_no_shared_parameters
from raymm.actors.weights.source import set_mode
from raymm.model.modality_module import ModelError
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.lowering import lower
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping


def multimodal_nodes(model: MultimodalModule) -> tuple[NodeSpec, ...]:
    """Its nodes as data for processes, in the graph's order."""
    encoders = (encoder_node(model.encoder_spec(name)) for name in model.encoder_names)
    return *encoders, language_node(model.language_spec())


def check_mapping(model: MultimodalModule, mapping: StageMapping) -> None:
    """Whether a mapping can run a model, before anything starts.

    Raises:
        MultiplexError: it is of other modules, or in another order than data flow, or puts a
            module that norms over all samples on several GPUs.
        ModelError: modules share parameters.
    """
    names = model.module_names
    for s, stage in enumerate(mapping.stages):
        for p, placement in enumerate(stage.placements):
            if placement.module not in names:
                raise MultiplexError(
                    f"stages[{s}].placements[{p}].module is {placement.module!r}; the model's "
                    f"modules are {', '.join(names)}"
                )
    placed = {placement.module for stage in mapping.stages for placement in stage.placements}
    if missing := [name for name in names if name not in placed]:
        raise MultiplexError(f"stages do not have {missing}; every module of the model must run")
    _check_shared(model)
    copies = lower(module_graph(model), mapping, mapping.gpus).replicas
    for name in model.encoder_names:
        spec, count = model.encoder_spec(name), len(copies[name])
        parts = [spec.source.skeleton()]
        parts += [spec.projector.skeleton()] if spec.projector is not None else []
        norms = [
            child for part in parts if set_mode(part).training
            for child in part.modules() if isinstance(child, _BatchNorm)
        ]
        if count > 1 and norms:
            raise MultiplexError(
                f"stages put {name!r} on {count} GPUs, which deals samples out over them, and it "
                "has norms over all samples (batch norm); accepted: one GPU, or freeze it"
            )


def _check_shared(model: MultimodalModule) -> None:
    parts = {}
    for name, modality in (*model.encoders.items(), (LANGUAGE_MODEL, model.language_model)):
        if modality.module is not None:
            parts[name] = modality.module
        if modality.projector is not None:
            parts[f"{name} projector"] = modality.projector
    try:
        check_no_shared_parameters(parts)
    except ValueError as error:
        raise ModelError(f"{error}; give each a copy of its own, or tie nothing") from None
