"""raymm: distributed training of multimodal models on Ray.

The public names below are stable; everything else may change. They are imported on first
use, so that ``import raymm`` is quick.

``raymm.actors``, ``raymm.scheduler`` and ``raymm.kernels`` lie beside this folder in
a checkout. When the package runs from a checkout that is not installed, they are
found there; an installed raymm has them below this folder.
"""

import importlib as _importlib
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from raymm.version import __version__

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "actors").is_dir():
    __path__.append(str(_root))


_PUBLIC = {
    "ModalityModule": "raymm.model",
    "MultimodalModule": "raymm.model",
    "FactorySource": "raymm.actors.stages.source",
    "Prepend": "raymm.actors.stages.merge",
    "ReplaceTokens": "raymm.actors.stages.merge",
    "Projector": "raymm.actors.stages.projector",
    "ParallelSpec": "raymm.specs",
    "MultimodalParallelSpec": "raymm.specs",
    "MultimodalParallelModule": "raymm.parallel",
    "StepOutput": "raymm.parallel_module",
    "NotFiniteError": "raymm.skipped_step",
    "SkippedStep": "raymm.skipped_step",
    "SkippedStepWarning": "raymm.skipped_step",
    "OptimizerConfig": "raymm.actors.optimizer",
    "RankResources": "raymm.actors.group",
    "RankFailedError": "raymm.actors.group",
    "ClusterError": "raymm.actors.group",
    "DataConfig": "raymm.data",
    "ModalityDataConfig": "raymm.data",
    "RunConfig": "raymm.config",
    "Trainer": "raymm.trainer",
    "Result": "raymm.trainer",
    "plan": "raymm.planning",
    "Planned": "raymm.planning",
    "plan_multiplexed": "raymm.multiplex_planning",
    "ModuleDag": "raymm.module_dag",
    "DagModule": "raymm.module_dag",
    "DagLoss": "raymm.module_dag",
    "every": "raymm.module_dag",
    "ContrastiveLoss": "raymm.contrastive",
    "MultiplexedModule": "raymm.multiplexed",
    "MultiplexedParallelModule": "raymm.multiplexed_parallel",
    "PlannedMultiplexed": "raymm.multiplex_planning",
    "PlanRequest": "raymm.plan_request",
    "Plan": "raymm.scheduler.plan",
    "PlanError": "raymm.scheduler.plan",
    "Timeline": "raymm.scheduler.timeline",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from raymm.actors.group import ClusterError, RankFailedError, RankResources
    from raymm.actors.optimizer import OptimizerConfig
    from raymm.actors.stages.merge import Prepend, ReplaceTokens
    from raymm.actors.stages.projector import Projector
    from raymm.actors.stages.source import FactorySource
    from raymm.config import RunConfig
    from raymm.contrastive import ContrastiveLoss
    from raymm.data import DataConfig, ModalityDataConfig
    from raymm.model import ModalityModule, MultimodalModule
    from raymm.module_dag import DagLoss, DagModule, ModuleDag, every
    from raymm.multiplex_planning import PlannedMultiplexed, plan_multiplexed
    from raymm.multiplexed import MultiplexedModule
    from raymm.multiplexed_parallel import MultiplexedParallelModule
    from raymm.parallel import MultimodalParallelModule
    from raymm.parallel_module import StepOutput
    from raymm.plan_request import PlanRequest
    from raymm.planning import Planned, plan
    from raymm.scheduler.plan import Plan, PlanError
    from raymm.scheduler.timeline import Timeline
    from raymm.skipped_step import NotFiniteError, SkippedStep, SkippedStepWarning
    from raymm.specs import MultimodalParallelSpec, ParallelSpec
    from raymm.trainer import Result, Trainer


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(_importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'raymm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
