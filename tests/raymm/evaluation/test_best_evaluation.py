"""Best evaluations, patience and the best checkpoint equal those of transformers' Trainer."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from raymm.config.sections import EvaluateSection, RunConfig
from raymm.evaluation.best_evaluation import BEST, BestEvaluation
from raymm.monitor.metrics import MetricsLog
from raymm.training.training_loop import TrainingLoop

VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=1, max_size=7)
MARGINS = "rewards/margins"


def trainer_decisions(values: list[float], greater: bool, patience: int) -> list[tuple]:
    """Return (step of the best, True to stop) after each evaluation, as the Trainer decides."""
    callback, control = EarlyStoppingCallback(patience), TrainerControl()
    state, best, decisions = TrainerState(), None, []
    args = SimpleNamespace(
        metric_for_best_model="m", greater_is_better=greater, load_best_model_at_end=True,
        eval_strategy="steps",
    )
    for step, value in enumerate(values, start=1):
        callback.on_evaluate(args, state, control, {"eval_m": value})
        # Rule of Trainer._determine_best_metric.
        if state.best_metric is None:
            state.best_metric = -math.inf if greater else math.inf
        if value > state.best_metric if greater else value < state.best_metric:
            state.best_metric, best = value, step
        decisions.append((best, control.should_training_stop))
        if control.should_training_stop:
            break
    return decisions


@given(VALUES, st.booleans(), st.integers(1, 3), st.integers(0, 6))
def test_best_and_patience_equal_the_trainers(
    tmp_path_factory, values, greater, patience, resumed
) -> None:
    """Include ties, NaN, steps without an evaluation, and a resumption between two evaluations."""
    folder = tmp_path_factory.mktemp("best")
    best = BestEvaluation(
        EvaluateSection(
            every=1, metrics=["anls"], best="anls", lower_is_better=not greater, patience=patience
        ),
        folder,
    )
    log, decisions = MetricsLog(folder / "metrics.jsonl"), []
    for step, value in enumerate(values, start=1):
        log.add({"step": step, "loss": 1.0})
        log.add({"step": step, "heldout_anls": value, "texts": 3})
        chosen = best.write(log.rows, range(1, step + 1))
        assert best.improved(log.rows) is (chosen == step)
        decisions.append((chosen, best.exhausted(log.rows) is not None))
        if decisions[-1][1]:
            break
        if step == resumed:
            log = MetricsLog(folder / "metrics.jsonl", step)
    assert decisions == trainer_decisions(values, greater, patience)
    assert (folder / BEST).exists() is (decisions[-1][0] is not None)


def rows_of(margins: list[int], heldout: bool) -> list[dict]:
    """Return rows of a held-out loss of pairs, which includes rewards, and of an evaluation."""
    rows = []
    for step, margin in enumerate(margins):
        both = {"step": step, f"heldout_{MARGINS}": float(margin)}
        rows += [{**both, "heldout_loss": 0.5}] * heldout + [{**both, "texts": 6}]
    return rows


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 3),
    st.sets(st.integers(1, 5)),
)
def test_the_start_counts_for_patience_only(
    tmp_path_factory, margins, patience, saved
) -> None:
    """Ignore held-out losses of pairs, which have the same names as evaluations.

    Only saved steps are candidates.
    """
    best = BestEvaluation(
        EvaluateSection(every=1, metrics=[MARGINS], best=MARGINS, patience=patience),
        tmp_path_factory.mktemp("best"),
    )
    rows, trained = rows_of(margins, heldout=True), margins[1:]
    is_best = bool(trained) and trained.index(max(trained)) == len(trained) - 1
    assert best.improved(rows) is is_best
    candidates = [step for step in saved if step < len(margins)]
    assert best.write(rows, saved) == max(
        sorted(candidates), key=margins.__getitem__, default=None
    )
    ends = len(margins) > patience and max(margins[-patience:]) <= max(margins[:-patience])
    assert (best.exhausted(rows) is not None) is ends
    assert best.exhausted(rows) == best.exhausted(rows_of(margins, heldout=False))


def test_the_best_is_saved_after_a_skipped_step(tmp_path) -> None:
    """Save the evaluated parameters, not those of the next step."""
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.add({"step": 4, "loss": None, "not_applied": {}})
    evaluate = EvaluateSection(every=2, metrics=["anls"], best="anls")
    texts = SimpleNamespace(
        best=BestEvaluation(evaluate, tmp_path), is_due=lambda step, last: step == 4,
        run=lambda step: {"step": step, "heldout_anls": 0.5, "texts": 1, "table": ""},
    )
    parallel = Mock(steps_taken=0, evaluated_weights=nullcontext)
    loop = TrainingLoop(
        RunConfig(steps=9, checkpoint_every=9, storage_path=str(tmp_path), evaluate=evaluate),
        batches=Mock(), parallel=parallel, store=Mock(), metrics=metrics, samples=None,
        observer=Mock(), throughput=Mock(), callbacks=Mock(), progress=Mock(), stop=Mock(),
        recovery=Mock(), texts=texts,
    )
    loop._checkpoints = Mock(saved=0)
    loop._pause_after(4)
    loop._checkpoints.take.assert_called_once()
