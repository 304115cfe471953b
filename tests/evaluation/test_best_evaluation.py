"""Which evaluation is the best, of rows of which not all are evaluations."""

from hypothesis import given
from hypothesis import strategies as st

from raymm.config.evaluate_section import EvaluateSection
from raymm.evaluation.text_evaluation import TextEvaluation

MARGINS = "rewards/margins"


def evaluation(folder, patience: int) -> TextEvaluation:
    """What decides by rows, without a model."""
    texts = TextEvaluation.__new__(TextEvaluation)
    texts.asked = EvaluateSection(every=1, metrics=[MARGINS], best=MARGINS, patience=patience)
    texts._folder = folder
    return texts


def rows_of(margins: list[int], heldout: bool) -> list[dict]:
    """Of a held-out loss of pairs of answers, which has rewards, too, and of an evaluation."""
    rows = []
    for step, margin in enumerate(margins):
        both = {"step": step, f"heldout_{MARGINS}": float(margin)}
        rows += [{**both, "heldout_loss": 0.5}] * heldout + [{**both, "texts": 6}]
    return rows


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 3))
def test_held_out_losses_of_pairs_are_no_evaluations(tmp_path_factory, margins, patience) -> None:
    """They have the same names; the best, and when a run ends, is as without them."""
    texts = evaluation(tmp_path_factory.mktemp("best"), patience)
    rows = rows_of(margins, heldout=True)
    *before, last = margins
    assert texts.better(rows) is all(last > margin for margin in before)
    assert texts.note_best(rows) == margins.index(max(margins))
    ends = len(margins) > patience and max(margins[-patience:]) <= max(margins[:-patience])
    assert (texts.exhausted(rows) is not None) is ends
    assert texts.exhausted(rows) == texts.exhausted(rows_of(margins, heldout=False))
