"""Schedules of modules that differ from that of the whole model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raymm.config.sections import METRICS, MOST_GIB, CacheSection, EvaluateSection, OptimizerSection

SCHEDULES = ("constant", "linear", "cosine")


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_a_module_may_have_a_longer_warm_up(steps, general, of_module):
    """Check that a module's schedule may end within its warm-up, as a run's may."""
    section = OptimizerSection(
        schedule="cosine", warmup_steps=general, modules={"vision": {"warmup_steps": of_module}}
    )
    rule = section.build(steps).rule("vision")
    assert rule.factor(0) == 0 and rule.factor(of_module) == 1
    assert rule.total_steps == max(steps, general, of_module)
    assert section.build(steps).total_steps == max(steps, general)


def test_a_warm_up_beyond_the_given_end_is_refused():
    with pytest.raises(ValueError, match=r"modules.vision.total_steps is 5 and warmup_steps 9"):
        OptimizerSection(
            schedule="cosine", total_steps=5, modules={"vision": {"warmup_steps": 9}}
        )


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(SCHEDULES))
def test_a_run_without_a_rate_is_noted(steps, general, of_vision, schedule):
    """Note that the rate is 0 in the first step of a warm-up: one step would train nothing."""
    section = OptimizerSection(
        schedule=schedule, warmup_steps=general, modules={"vision": {"warmup_steps": of_vision}}
    )
    notes = list(section.build(steps).notes(steps, ["vision", "llm"]))
    warmups = {"vision": of_vision, "llm": general}
    assert len(notes) == (len({w for w in warmups.values() if w}) if steps == 1 else 0)
    for note in notes:
        (warmup,) = {w for w in warmups.values() if f"warmup_steps is {w}:" in note}
        idle = ", ".join(name for name, w in warmups.items() if w == warmup)
        assert "run.steps is 1 and " in note and f"does not train {idle}. Set" in note


def test_room_is_above_zero_and_at_most_a_pebibyte():
    assert CacheSection(room_gib=MOST_GIB).room_gib == MOST_GIB
    for room in (0.0, -1.0, MOST_GIB + 1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="room_gib"):
            CacheSection(room_gib=room)


def test_other_places_of_features_are_refused_by_name():
    with pytest.raises(ValidationError, match="(?s)features.*'disk', 'host' or 'none'.*'gpu'"):
        CacheSection.model_validate({"features": "gpu"})


def test_names_are_not_blank():
    for field in ("folder", "version"):
        with pytest.raises(ValidationError, match=f"(?s){field}.*not blank"):
            CacheSection.model_validate({field: " "})


def test_metrics_are_known_or_import_paths():
    assert EvaluateSection(every=1, metrics=[*METRICS, "a.b:c"]).metrics[-1] == "a.b:c"
    with pytest.raises(ValidationError, match="(?s)accepted: exact_match, anls.*'bleu'"):
        EvaluateSection(every=1, metrics=["bleu"])
    with pytest.raises(ValidationError, match="metrics"):
        EvaluateSection(every=1, metrics=[])


def test_the_best_metric_is_one_that_is_measured():
    with pytest.raises(ValidationError, match=r"best is 'wer'; accepted: one of metrics, \['anls'"):
        EvaluateSection(every=1, metrics=["anls"], best="wer")
    for option in ({"patience": 2}, {"lower_is_better": False}):
        with pytest.raises(ValidationError, match="need best"):
            EvaluateSection(every=1, **option)


@pytest.mark.parametrize(("metric", "smallest"), [
    ("exact_match", False), ("anls", False), ("wer", True), ("perplexity", True),
    ("preference_loss", True), ("rewards/margins", False), ("a:b", False),
])
def test_errors_are_better_if_lower(metric, smallest):
    section = EvaluateSection(every=1, metrics=[metric], best=metric)
    assert section.smallest is smallest
    chosen = section.model_copy(update={"lower_is_better": not smallest})
    assert chosen.smallest is not smallest
