"""Multiplexed mappings as plans of a model."""

from __future__ import annotations

from raymm.actors.quota import check_no_shared_parameters
from raymm.errors import ModelError
from raymm.model.module_dag import ModuleDag
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.multiplex.mapped_plan import mapped_plan
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan


def plan_of_mapping(
    model: MultimodalModule | ModuleDag, mapping: StageMapping, microbatches: int = 1
) -> Plan:
    """The plan that runs a mapping: modules in slots that follow one another, on their GPUs and
    quotas; copies of a module split every microbatch by samples (Mosaic §3).

    Args:
        model: the description.
        mapping: stages, GPUs and quotas of its modules (:func:`raymm.plan_multiplexed`). Losses
            that it does not name run after its last stage, on the GPUs of what they read last.
        microbatches: of a step. They run one after another, each whole through whole modules; a
            mapping is planned for a step of one.

    Raises:
        PlanError: it is of other modules.
        PlanError: a module does not run after what it reads.
        ModelError: modules share parameters.
    """
    if isinstance(model, ModuleDag):
        return mapped_plan(model.graph, mapping, microbatches)
    parts = {}
    for name, modality in (*model.encoders.items(), (LANGUAGE_MODEL, model.language_model)):
        if modality.module is not None:
            parts[name] = modality.module
        if modality.projector is not None:
            parts[f"{name} projector"] = modality.projector
    try:
        check_no_shared_parameters(parts)
    except ValueError as error:
        raise ModelError(
            f"{error}; give each module a separate copy, or do not tie parameters"
        ) from None
    return mapped_plan(module_graph(model), mapping, microbatches)
