"""Results of runs: their last step, steps that were not applied, and the best checkpoint."""

import json

import pytest

from raymm.evaluation.best_evaluation import BEST
from raymm.storage.step_folders import folder_name
from raymm.training.result import Result, last_step, steps_not_applied

BAD = {"loss": None, "not_applied": "llm"}
GOOD = {"loss": 1.0}
EVALUATED = {"heldout_loss": 2.0}


@pytest.mark.parametrize(("rows", "every", "at_the_end"), [
    ([], 0, 0), ([EVALUATED], 0, 0), ([GOOD, BAD, GOOD], 1, 0), ([BAD, GOOD, BAD, EVALUATED], 2, 1),
    ([BAD, EVALUATED, BAD], 2, 2),
])
def test_steps_that_were_not_applied_are_counted(rows, every, at_the_end):
    assert steps_not_applied(rows) == every
    assert steps_not_applied(rows, at_the_end=True) == at_the_end


def test_the_last_step_is_the_last_row_with_a_loss():
    assert last_step([GOOD, BAD, EVALUATED]) is BAD
    assert last_step([EVALUATED]) == {} == last_step([])


def test_the_best_checkpoint_has_the_form_of_the_last(tmp_path):
    (tmp_path / "checkpoints" / folder_name(3)).mkdir(parents=True)
    last = tmp_path / "checkpoints" / folder_name(9)
    assert Result({}, [], last, tmp_path).best_checkpoint is None
    (tmp_path / BEST).write_text(json.dumps({"step": 3}))
    assert Result({}, [], last, tmp_path).best_checkpoint == last.with_name(folder_name(3))
    assert Result({}, [], None, tmp_path).best_checkpoint is None
    url = f"s3://b/run/{folder_name(9)}"
    assert Result({}, [], url, tmp_path).best_checkpoint == f"s3://b/run/{folder_name(3)}"


def test_a_best_checkpoint_that_was_removed_is_none(tmp_path):
    (tmp_path / BEST).write_text(json.dumps({"step": 3}))
    assert Result({}, [], tmp_path / folder_name(9), tmp_path).best_checkpoint is None


def test_notebooks_show_a_run_without_steps(tmp_path):
    html = Result({}, [], None, tmp_path, stopped="after <step> 0")._repr_html_()
    assert "0 steps" in html and "after &lt;step&gt; 0" in html
    row = {"step": 2, "loss": None, "tokens_per_s": None}
    assert "2 steps" in Result(row, [row], None, tmp_path)._repr_html_()
    row |= {"loss": 1.23456, "tokens_per_s": 12345.6}
    assert "loss 1.2346, 12,346 tokens/s" in Result(row, [row], None, tmp_path)._repr_html_()
