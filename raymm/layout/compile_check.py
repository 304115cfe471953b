"""Check that the blocks of a model can be compiled under a plan."""

from __future__ import annotations

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.stages.language import LanguageSpec
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.scheduler.costs.recomputation import ALL, KEEP
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedules.registry import find_schedule


def check_compiled(model: Model, plan: Plan, kernels: str) -> None:
    """Raise a PlanError for ``run.compile: blocks`` where blocks cannot be compiled, or where
    compiled blocks would compute something else. Names the module, the setting and what is
    accepted."""
    if kernels == "auto":
        raise PlanError(
            "run.compile is 'blocks' and run.kernels 'auto', which measures kernels in the middle "
            "of a block; accepted: kernels raymm or raymm_unordered, or compile null"
        )
    if find_schedule(plan.schedule).splits_backward:
        raise PlanError(
            f"run.compile is 'blocks' and schedule {plan.schedule!r}, which splits the backward of "
            "a block in two; accepted: a schedule that does not, such as 1f1b, or compile null"
        )
    for node in plan.graph.nodes:
        spec = model.spec(node.name)
        if isinstance(spec, LanguageSpec) and spec.mixture is not None:
            raise _refused(node.name, "is a mixture of experts", "a dense model")
        if isinstance(spec, LanguageSpec) and spec.mixers:
            layers = ", ".join(sorted(spec.mixers))
            raise _refused(node.name, f"gets documents apart in {layers}", "attention layers")
        if find_blocks(spec.source.skeleton()) is None:
            raise _refused(node.name, "has no list of blocks", "a module with one")
        for stage in plan.module_stages(node.name):
            _check_stage(plan, stage)


def _check_stage(plan: Plan, stage: Stage) -> None:
    name = stage.module
    for degree, value in (("tp", stage.tp), ("cp", stage.cp), ("fsdp", stage.shards)):
        if value > 1:
            raise _refused(name, f"has {degree} {value}", f"{degree} 1")
    if stage.split == SAMPLES and len(plan.replicas(name)) > 1:
        raise _refused(name, "has replicas that split microbatches by samples", "one replica")
    if stage.quota is not None:
        raise _refused(name, f"has a quota of {stage.quota:g} of a device", "no quotas")
    if options := sorted(set(stage.layer_options) - {KEEP, ALL}):
        raise _refused(
            name, f"has recompute_layers {options[0]!r}, which selects operators within a block",
            f"{KEEP} or {ALL}",
        )  # fmt: skip


def _refused(name: str, reason: str, accepted: str) -> PlanError:
    return PlanError(
        f"run.compile is 'blocks', but {name!r} {reason}; accepted: {accepted}, or compile null"
    )
