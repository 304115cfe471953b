"""raymm: distributed training of multimodal models on Ray.

The public names below are stable; everything else may change. They are imported on first use, so
that ``import raymm`` is fast.

``raymm.actors``, ``raymm.scheduler`` and ``raymm.kernels`` are links to folders next to this one in
a checkout.
"""

import importlib as _importlib
import logging as _logging
from typing import TYPE_CHECKING

from raymm.version import __version__

# transformers imports torchao, which causes this warning of torch. A user cannot act on it.
_logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum" not in record.getMessage()
)

_PUBLIC = {
    "ModalityModule": "raymm.model.modality_module",
    "MultimodalModule": "raymm.model.multimodal",
    "LoraConfig": "raymm.actors.adapters.lora_config",
    "FactorySource": "raymm.actors.weights.source",
    "CrossAttend": "raymm.actors.modules.merge",
    "Prepend": "raymm.actors.modules.merge",
    "ReplaceTokens": "raymm.actors.modules.merge",
    "Projector": "raymm.actors.modules.projector",
    "StageHook": "raymm.actors.stages.stage_hook",
    "HookCall": "raymm.actors.stages.stage_hook",
    "ParallelSpec": "raymm.runtime.specs",
    "MultimodalParallelSpec": "raymm.runtime.specs",
    "ParallelModel": "raymm.runtime.parallel_model",
    "StepOutput": "raymm.runtime.parallel_module",
    "NotFiniteError": "raymm.errors",
    "SkippedStep": "raymm.runtime.skipped_step",
    "SkippedStepWarning": "raymm.runtime.skipped_step",
    "OptimizerConfig": "raymm.actors.optimizer.optimizer_config",
    "RankResources": "raymm.actors.rank.rank_resources",
    "Error": "raymm.errors",
    "InputError": "raymm.errors",
    "RunError": "raymm.errors",
    "RankFailedError": "raymm.errors",
    "ClusterError": "raymm.errors",
    "DataConfig": "raymm.data",
    "ModalityDataConfig": "raymm.data",
    "RunConfig": "raymm.config.sections",
    "connect": "raymm.runtime.cluster",
    "Trainer": "raymm.training.trainer",
    "Callback": "raymm.callbacks.callback",
    "RunHook": "raymm.callbacks.callback",
    "Result": "raymm.training.result",
    "export_model": "raymm.storage.export",
    "plan": "raymm.planning.search",
    "Planned": "raymm.planning.plan",
    "plan_multiplexed": "raymm.planning.multiplexed",
    "from_pretrained": "raymm.model.vlm",
    "PretrainedVlm": "raymm.model.vlm",
    "vlm_plan": "raymm.runtime.specs",
    "ModuleDag": "raymm.model.module_dag",
    "DagModule": "raymm.model.dag_module",
    "DagLoss": "raymm.model.dag_module",
    "every": "raymm.model.dag_module",
    "normal_noise": "raymm.actors.modules.noise",
    "uniform_noise": "raymm.actors.modules.noise",
    "SampleSeeds": "raymm.actors.modules.noise",
    "ContrastiveLoss": "raymm.model.contrastive",
    "dag_plan": "raymm.runtime.specs",
    "plan_of_mapping": "raymm.layout.mapping_plan",
    "PlannedMultiplexed": "raymm.planning.multiplexed",
    "PlanPass": "raymm.planning.passes",
    "PlanRequest": "raymm.planning.request",
    "Plan": "raymm.scheduler.plan.plan",
    "Schedule": "raymm.scheduler.schedules.base",
    "PlanError": "raymm.errors",
    "Timeline": "raymm.scheduler.program.timeline",
}

# Former names of classes and functions.
_FORMER: dict[str, str] = {
    "MultimodalParallelModule": "ParallelModel", "WholeParallelModule": "ParallelModel",
    "DagParallelModule": "ParallelModel", "WholeModel": "PretrainedVlm", "whole_plan": "vlm_plan",
}

# The names come from the table; pyright only reads lists of literals.
__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from raymm.actors.adapters.lora_config import LoraConfig
    from raymm.actors.modules.merge import CrossAttend, Prepend, ReplaceTokens
    from raymm.actors.modules.noise import SampleSeeds, normal_noise, uniform_noise
    from raymm.actors.modules.projector import Projector
    from raymm.actors.optimizer.optimizer_config import OptimizerConfig
    from raymm.actors.rank.rank_resources import RankResources
    from raymm.actors.stages.stage_hook import HookCall, StageHook
    from raymm.actors.weights.source import FactorySource
    from raymm.callbacks.callback import Callback, RunHook
    from raymm.config.sections import RunConfig
    from raymm.data import DataConfig, ModalityDataConfig
    from raymm.errors import (
        ClusterError,
        Error,
        InputError,
        NotFiniteError,
        PlanError,
        RankFailedError,
        RunError,
    )
    from raymm.layout.mapping_plan import plan_of_mapping
    from raymm.model.contrastive import ContrastiveLoss
    from raymm.model.dag_module import DagLoss, DagModule, every
    from raymm.model.modality_module import ModalityModule
    from raymm.model.module_dag import ModuleDag
    from raymm.model.multimodal import MultimodalModule
    from raymm.model.vlm import PretrainedVlm, from_pretrained
    from raymm.planning.multiplexed import PlannedMultiplexed, plan_multiplexed
    from raymm.planning.passes import PlanPass
    from raymm.planning.plan import Planned
    from raymm.planning.request import PlanRequest
    from raymm.planning.search import plan
    from raymm.runtime.cluster import connect
    from raymm.runtime.parallel_model import ParallelModel
    from raymm.runtime.parallel_module import StepOutput
    from raymm.runtime.skipped_step import SkippedStep, SkippedStepWarning
    from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, dag_plan, vlm_plan
    from raymm.scheduler.plan.plan import Plan
    from raymm.scheduler.program.timeline import Timeline
    from raymm.scheduler.schedules.base import Schedule
    from raymm.storage.export import export_model
    from raymm.training.result import Result
    from raymm.training.trainer import Trainer


def __getattr__(name: str) -> object:
    name = _FORMER.get(name, name)
    if name in _PUBLIC:
        return getattr(_importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'raymm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
