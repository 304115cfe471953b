"""Best evaluations and patience, against transformers' EarlyStoppingCallback."""

import math
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from raymm.config.evaluate_section import EvaluateSection
from raymm.evaluation.text_evaluation import BEST, TextEvaluation
from raymm.monitor.metrics import MetricsLog

VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=1, max_size=7)


def trainer_decisions(values: list[float], greater: bool, patience: int) -> list[tuple]:
    """Return (index of the best, True to stop) after each evaluation, as the Trainer decides."""
    callback, control = EarlyStoppingCallback(patience), TrainerControl()
    state, best, decisions = TrainerState(), None, []
    args = SimpleNamespace(
        metric_for_best_model="m", greater_is_better=greater, load_best_model_at_end=True,
        eval_strategy="steps",
    )
    for index, value in enumerate(values):
        callback.on_evaluate(args, state, control, {"eval_m": value})
        # The rule of Trainer._determine_best_metric.
        if state.best_metric is None:
            state.best_metric = -math.inf if greater else math.inf
        if value > state.best_metric if greater else value < state.best_metric:
            state.best_metric, best = value, index
        decisions.append((best, control.should_training_stop))
        if control.should_training_stop:
            break
    return decisions


@given(VALUES, st.booleans(), st.integers(1, 3), st.integers(0, 6))
def test_best_and_patience_equal_the_trainers(
    tmp_path_factory, values, greater, patience, resumed
) -> None:
    """With ties, NaN, steps without an evaluation, and a resume between two evaluations."""
    folder = tmp_path_factory.mktemp("best")
    texts = TextEvaluation.__new__(TextEvaluation)
    texts.asked = EvaluateSection(
        every=1, metrics=["anls"], best="anls", lower_is_better=not greater, patience=patience
    )
    texts._folder = folder
    log, decisions = MetricsLog(folder / "metrics.jsonl"), []
    for step, value in enumerate(values):
        log.add({"step": step, "loss": 1.0})
        log.add({"step": step, "heldout_anls": value, "texts": 3})
        decisions.append((texts.note_best(log.rows), texts.exhausted(log.rows) is not None))
        if decisions[-1][1]:
            break
        if step == resumed:
            log = MetricsLog(folder / "metrics.jsonl", step)
    assert decisions == trainer_decisions(values, greater, patience)
    assert (folder / BEST).exists() is (decisions[-1][0] is not None)
