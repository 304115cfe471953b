"""Comparisons of a soaked run with the undisturbed one; each returns its problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.soak.soak_faults import NOT_FINITE_EVERY
from tests.soak.trials import Trial

# Maximum number of repeated steps, with a snapshot per step. After a lost node, those in flight, as
# another node must first have its part of the snapshot.
MOST_REDONE = {"node": 2}


def other_losses(losses: Sequence[Any], undisturbed: Sequence[Any]) -> str:
    """Compare losses with the first ones of the undisturbed run; there must be some.

    Args:
        losses, undisturbed: losses of every step.
    """
    if not losses:
        return "there is no step"
    same = losses == undisturbed[: len(losses)]
    return "" if same else "losses are others"


def other_samples(
    samples: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], steps: int
) -> str:
    """Check that each step has a row of samples, equal to the undisturbed run's.

    Args:
        samples, undisturbed: rows of ``samples.jsonl``.
        steps: finished steps.
    """
    if len(samples) != steps:
        return f"there are samples of {len(samples)} steps, and {steps} were taken"
    if not all(row["microbatches"] and all(row["microbatches"]) for row in samples):
        return "there is a microbatch without samples"
    return "" if samples == undisturbed[:steps] else "samples are others"


def other_heldout_losses(
    rows: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]
) -> str:
    """Compare held-out losses with the first ones of the undisturbed run.

    Args:
        rows, undisturbed: rows of ``metrics.jsonl``.
    """
    own, others = ([(row["step"], row["heldout_loss"]) for row in each if "heldout_loss" in row]
                   for each in (rows, undisturbed))
    if not own:
        return "there is no held-out loss"
    return "" if own == others[: len(own)] else "held-out losses are others"


def other_steps_not_finite(rows: Sequence[Mapping[str, Any]]) -> str:
    """Check that exactly the steps with non-finite inputs were skipped as non-finite.

    Args:
        rows: rows of ``metrics.jsonl``.
    """
    taken = [row["step"] for row in rows if "loss" in row]
    due = [step for step in taken if step % NOT_FINITE_EVERY == 0]
    not_applied = [row["step"] for row in rows if "not_applied" in row]
    if not_applied == due and (due or max(taken, default=0) < NOT_FINITE_EVERY):
        return ""
    return f"steps {not_applied} were not applied, and inputs of {due} are not finite"


def not_as_it_should_be(trial: Trial) -> list[str]:
    """Return the problems of a finished trial.

    Args:
        trial: trial that has ended, or should have.
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
