"""Checks and settings at the start of a run: learning rate schedules, token ids, data position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig, UpdateRule
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.weights.hub_folder import pinned
from raymm.config.sections import METRICS, OF_PAIRS, PERPLEXITY, RunConfig
from raymm.data import DataConfig, open_split
from raymm.data.readers import Dataset
from raymm.errors import CheckpointError, ConfigError
from raymm.layout.plan_check import check_modules, check_optimizer
from raymm.layout.preference_check import check_loss
from raymm.model.model import Model
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint


def open_splits(data: object) -> dict[str, Dataset]:
    """Open ``"train"`` and, if configured, ``"heldout"``; return none for batches in memory."""
    if not isinstance(data, DataConfig):
        return {}
    return {
        split: open_split(data, split) for split in ("train", "heldout")
        if getattr(data, split) is not None
    }


def check_updates(
    optimizer: OptimizerConfig, run: RunConfig, model: Model, plan: object
) -> None:
    """Check that every step has a learning rate above 0 and every optimizer rule matches a module.

    Args:
        plan: plan of the run; any other value if the plan is not known yet.

    Raises:
        ConfigError: steps would not change the model, or evaluation metrics do not fit its loss.
        PlanError: see :func:`raymm.layout.plan_check.check_optimizer` and
            :func:`raymm.layout.preference_check.check_loss`.
    """
    if run.evaluate is not None:
        pairs, custom = model.preference is not None, model.token_loss is not None
        wrong = {PERPLEXITY} if pairs else {*OF_PAIRS, *((PERPLEXITY,) if custom else ())}
        if unsupported := wrong.intersection(run.evaluate.metrics):
            loss = "a preference loss" if pairs else "a custom loss" if custom else "cross entropy"
            raise ConfigError(
                f"run.evaluate.metrics has {min(unsupported)!r}, but the model's loss is "
                f"{loss}; accepted: {', '.join(name for name in METRICS if name not in wrong)}"
            )
    check_loss(model, plan if isinstance(plan, Plan) else None)
    # "auto" may become bf16 on a GPU or by a checkpoint; the trainer checks again once it is known.
    in_bf16 = run.precision != "fp32"
    if isinstance(plan, Plan):
        check_optimizer(optimizer, plan, in_bf16)
    else:
        check_modules(optimizer, model.graph, in_bf16)
    steps = run.steps
    rules = {"optimizer": optimizer} | {
        f"optimizer.modules.{name}": optimizer.rule(name) for name in optimizer.modules
    }
    for where, rule in rules.items():
        rule.check_schedule(f"{where}.schedule", steps)
        if (first := _first_without_rate(rule, steps)) is not None:
            raise ConfigError(
                f"{where}.total_steps is {rule.total_steps} and run.steps {steps}: the "
                f"{rule.schedule} learning rate would be 0 from step {first} on. Set total_steps "
                f"to at least {steps}, leave it out (default: run.steps), or set min_lr_ratio "
                "above 0"
            )


def _first_without_rate(optimizer: UpdateRule, steps: int) -> int | None:
    """Return the first step (from 1) with rate 0 after the end of the schedule, or None."""
    if optimizer.schedule not in ("linear", "cosine") or optimizer.min_lr_ratio > 0:
        return None
    if optimizer.total_steps is None or optimizer.total_steps >= steps:
        return None
    return optimizer.total_steps + 1


def with_vocabulary(data: Any, model: Model) -> Any:
    """Return the data configuration with the model's token ids and, for a Hugging Face VLM, the
    inputs of its towers."""
    preference = model.preference
    if not isinstance(data, DataConfig):
        if preference is not None and preference.asked_once:
            raise ConfigError(
                f"reference is {preference.reference!r}, which needs row ids, but batches in "
                "memory have none; pass a DataConfig as data"
            )
        return data
    pairs = preference is not None
    if pairs != (data.preferences is True):
        raise ConfigError(
            f"data.preferences is {data.preferences}, but the model's loss is "
            f"{'a preference loss' if pairs else 'cross entropy'}; accepted: true with a "
            "preference loss, false with cross entropy"
        )
    if data.vocabulary is not None:
        return data
    return data.model_copy(
        update={"vocabulary": model.vocabulary, "towers": model.tower_inputs}
    )


def with_commits(data: Any) -> Any:
    """Return the data configuration with hub ids of tokenizer and processor pinned to their
    commits, so that data workers on all nodes read the same files.

    Raises:
        ConfigError: the cache does not have the files, and the hub does not have them or cannot be
            reached.
    """
    if not isinstance(data, DataConfig):
        return data
    names = {"tokenizer": data.tokenizer, "processor": data.processor}
    return data.model_copy(update={
        field: pinned(path) for field, path in names.items() if path is not None
    })


def placement_beside(
    run: RunConfig, data: Any, say: Callable[[str], None], check: Callable[[], None]
) -> PlacementOptions:
    """Return placement options that reserve bundles for data workers besides the ranks. Evaluation
    workers get bundles in addition to those of training workers."""
    bundles: tuple[dict[str, float], ...] = ()
    if isinstance(data, DataConfig) and data.worker_cpus:
        evaluates = (run.eval_every or run.evaluate) and data.heldout
        bundles = ({"CPU": data.worker_cpus},) * (data.num_workers * (1 + bool(evaluates)))
    return PlacementOptions(
        bundles, run.spares, wait_for_nodes_s=run.wait_for_nodes_s, say=say, check=check,
    )


def data_position(checkpoint: Checkpoint | None) -> Any:
    """Return the data position saved in a checkpoint; None for the beginning.

    Raises:
        CheckpointError: the checkpoint was not saved by a trainer.
    """
    if checkpoint is None:
        return None
    if "data" not in checkpoint.manifest.trainer:
        raise CheckpointError(
            f"{checkpoint.folder} has no position in the data: it was not saved by a trainer"
        )
    return checkpoint.manifest.trainer["data"]
