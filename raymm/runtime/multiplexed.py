"""Names under which models ran by mappings before plans did the same; they say so, and go."""

from __future__ import annotations

import warnings
from typing import Any

from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_dag import DagParallelModule
from raymm.runtime.pipelined import MultimodalParallelModule
from raymm.scheduler.multiplex.mapping import Mapping


def MultiplexedModule(  # noqa: N802  it was a class
    dag: ModuleDag, mapping: Mapping, **options: Any
) -> DagParallelModule:
    """A graph under a mapping.

    Args:
        dag: the model.
        mapping: stages, GPUs and quotas of its modules.
        **options: as of :class:`raymm.DagParallelModule`.
    """
    _say("MultiplexedModule", "DagParallelModule")
    return DagParallelModule(dag, plan_of_mapping(dag, mapping), **options)


def MultiplexedParallelModule(  # noqa: N802  it was a class
    model: MultimodalModule, mapping: Mapping, *, microbatches: int = 1, **options: Any
) -> MultimodalParallelModule:
    """A multimodal model under a mapping.

    Args:
        model: the description.
        mapping: stages, GPUs and quotas of its modules.
        microbatches: of a step.
        **options: as of :class:`raymm.MultimodalParallelModule`.
    """
    _say("MultiplexedParallelModule", "MultimodalParallelModule")
    return MultimodalParallelModule(
        model, plan_of_mapping(model, mapping, microbatches), **options
    )


def _say(old: str, new: str) -> None:
    warnings.warn(
        f"raymm.{old}(model, mapping) goes away; use raymm.{new}(model, "
        "raymm.plan_of_mapping(model, mapping))",
        DeprecationWarning, stacklevel=3,
    )
