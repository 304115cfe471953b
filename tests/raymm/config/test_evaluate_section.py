"""The section ``run.evaluate``: metrics, and the metric of the best checkpoint."""

import pytest
from pydantic import ValidationError

from raymm.config.evaluate_section import METRICS, EvaluateSection


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
