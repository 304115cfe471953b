"""What a soaked run has to have in common with the undisturbed one; each says what is not so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soak_faults import NOT_FINITE_EVERY
from trials import Trial

# Steps that are taken again, at most, with a snapshot per step. Of a lost node: those in flight, as
# another node has to have its part of the snapshot first.
MOST_REDONE = {"node": 2}


def other_losses(losses: Sequence[Any], undisturbed: Sequence[Any]) -> str:
    """Losses are the first of the undisturbed run's; there are some.

    Args:
        losses, undisturbed: of every step.
    """
    if not losses:
        return "there is no step"
    same = losses == undisturbed[: len(losses)]
    return "" if same else "losses are others"


def other_samples(
    samples: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], steps: int
) -> str:
    """Each step of the run has a row of samples, the undisturbed run's.

    Args:
        samples, undisturbed: rows of ``samples.jsonl``.
        steps: that were taken.
    """
    if len(samples) != steps:
        return f"there are samples of {len(samples)} steps, and {steps} were taken"
    if not all(row["microbatches"] and all(row["microbatches"]) for row in samples):
        return "there is a microbatch without samples"
    return "" if samples == undisturbed[:steps] else "samples are others"


def other_heldout_losses(
    rows: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]
) -> str:
    """Held-out losses are the first of the undisturbed run's.

    Args:
        rows, undisturbed: of ``metrics.jsonl``.
    """
    own, others = ([(row["step"], row["heldout_loss"]) for row in each if "heldout_loss" in row]
                   for each in (rows, undisturbed))
    if not own:
        return "there is no held-out loss"
    return "" if own == others[: len(own)] else "held-out losses are others"


def other_steps_not_finite(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those are not finite, and not applied, whose inputs are not, and no others.

    Args:
        rows: of ``metrics.jsonl``.
    """
    taken = [row["step"] for row in rows if "loss" in row]
    due = [step for step in taken if step % NOT_FINITE_EVERY == 0]
    not_applied = [row["step"] for row in rows if "not_applied" in row]
    if not_applied == due and (due or max(taken, default=0) < NOT_FINITE_EVERY):
        return ""
    return f"steps {not_applied} were not applied, and inputs of {due} are not finite"


def not_as_it_should_be(trial: Trial) -> list[str]:
    """Of one that went wrong.

    Args:
        trial: that is over, or should be.
    """
    if trial.new_step is None:
        return ["not over"]
    wrong = {
        "others' losses": not trial.identical, "not named": not trial.named,
        f"{trial.redone} steps redone": trial.redone > MOST_REDONE.get(trial.role, 1)
        and not trial.ends_process,
        "no spare came": trial.takes_spare and not trial.spare_came,
        f"driver ended with {trial.ended_otherwise}": bool(trial.ended_otherwise),
    }
    return [what for what, is_so in wrong.items() if is_so]
