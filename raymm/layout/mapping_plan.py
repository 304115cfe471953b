"""Conversion of multiplexed mappings to plans."""

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
    """Return the plan that runs a mapping (Mosaic §3).

    Modules run in sequential slots on their GPUs and quotas. Replicas of a module split every
    microbatch by samples. Losses that the mapping does not name run after its last stage, on the
    GPUs of their last inputs. The microbatches of a step run sequentially; a mapping is planned for
    one.

    Raises:
        PlanError: the mapping is of other modules, or a module does not run after its inputs.
        ModelError: modules share parameters.
    """
    if isinstance(model, ModuleDag):
        return mapped_plan(model.graph, mapping, microbatches)
    modules = {}
    for name, modality in (*model.encoders.items(), (LANGUAGE_MODEL, model.language_model)):
        if modality.module is not None:
            modules[name] = modality.module
        if modality.projector is not None:
            modules[f"{name} projector"] = modality.projector
    try:
        check_no_shared_parameters(modules)
    except ValueError as error:
        raise ModelError(
            f"{error}; give each module a separate copy, or do not tie parameters"
        ) from None
    return mapped_plan(module_graph(model), mapping, microbatches)
