"""The pages with figures are those that the files of benchmarks' results give."""

import copy

import pytest

from benchmarks.results import README, RESULTS, read_log, readme, results_page


def test_pages_have_the_figures_of_the_log():
    """Run `python -m benchmarks.results` if this fails."""
    log, text = read_log(), README.read_text()
    assert RESULTS.read_text() == results_page(log)
    assert text == readme(text, log)
    changed = copy.deepcopy(log)
    changed["vlm_matrix"]["counts"]["vision- or audio-language model"]["exact"] += 1
    assert results_page(changed) != results_page(log)
    assert readme(text, changed) != text


def test_a_file_that_the_page_cannot_show_is_rejected():
    log = read_log()
    with pytest.raises(SystemExit, match="differ: other"):
        results_page(log | {"other": log["planner"]})
    printed = {"command": "x", "commit": None, "machine": log["vlm_matrix"]["runs"][0]["machine"]}
    with pytest.raises(SystemExit, match="planner.json: add its fields to FIELDS"):
        results_page(log | {"planner": printed})
