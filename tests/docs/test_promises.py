"""Promises of the pages about faults and hostile input, each with the test that holds it.

The tests are named by file and function, and run where they are. A promise that is reworded must be
compared with its test again.
"""

import ast
import functools

import pytest

from tests.house import ROOT

PROMISES = {
    "docs/checkpoints.md": {
        "Removing a checkpoint removes only the files that its manifest names.":
            "tests/storage/test_links.py::"
            "test_links_and_other_files_within_a_step_keep_their_targets",
        "A symbolic link is removed and its target is kept.":
            "tests/storage/test_links.py::test_a_linked_step_loses_its_link_only",
        "that cannot be written stay in memory and are written, in order, with the first later row":
            "tests/training/test_metrics.py::test_rows_stay_in_memory_while_the_disk_is_full",
        "the run goes on and saves when the next one is due":
            "tests/training/test_full_disk.py::"
            "test_a_full_disk_costs_checkpoints_but_no_step_and_no_row",
        "A folder that has other files in it is renamed":
            "tests/storage/test_links.py::test_a_run_on_another_disk_keeps_what_is_beside_it",
    },
    "docs/clusters.md": {
        "has a sentence on the standard error, too, which a second process prints":
            "tests/training/test_last_words.py::"
            "test_only_a_process_that_cannot_speak_is_spoken_for",
        "SIGTERM before that still finishes the step, saves, and ends with 143":
            "tests/training/test_lost_servers.py::test_a_lost_server_ends_the_run",
        "ends with code 1; the sentence is the run's, or the second process's":
            "tests/training/test_lost_servers.py::test_a_lost_server_ends_the_run",
        "also while it starts, says of which kind it is":
            "tests/actors/faults/test_failure_kind.py::"
            "test_rays_own_errors_of_constructors_have_the_kind",
        "retries the step after 1, 5 and 25 seconds":
            "tests/training/test_failure_policy.py::"
            "test_retries_of_a_shortage_wait_longer_until_a_step_is_done",
        "by the type of the error and of what it was raised from":
            "tests/actors/faults/test_failure_kind.py::test_kinds_of_real_faults",
        "in one step ends the run with code 1":
            "tests/training/test_recovery.py::"
            "test_a_shortage_that_lasts_ends_the_run_after_its_retries",
        "resource is never skipped, whatever `data.on_error` is":
            "tests/training/test_recovery.py::test_shortages_that_pass_change_no_loss",
    },
    "docs/security.md": {
        "more than a million times for one sample is refused with that sample":
            "tests/data/conversations/test_template_limits.py::test_endless_templates_are_refused",
        "is refused before it is tokenized":
            "tests/data/samples/test_row_errors.py::test_a_row_with_too_much_text_is_refused",
        "which raymm switches on unless `RAY_AUTH_MODE` is set":
            "tests/runtime/test_cluster.py::test_an_embedded_ray_wants_a_token",
        "have the permissions that the `umask` of the process leaves":
            "tests/storage/test_run_folder.py::"
            "test_files_of_a_checkpoint_can_be_read_by_whom_the_umask_lets",
        "is read only if it is a regular file, and up to a size":
            "tests/actors/storage/test_plain_file.py::test_only_regular_files_are_read",
        "is reported, and never waited for":
            "tests/storage/test_odd_checkpoints.py::"
            "test_an_odd_checkpoint_is_one_line_and_the_others_are_used",
        "cannot be listed is reported in one line; the others are used":
            "tests/storage/test_odd_checkpoints.py::test_a_folder_that_may_not_be_listed_is_reported",
        "name that leads to another folder is refused":
            "tests/actors/weights/test_stored_weights.py::"
            "test_an_index_names_files_of_its_folder_only",
        "it removes the link and keeps the link's target":
            "tests/storage/test_links.py::test_a_linked_step_loses_its_link_only",
    },
}


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Names of the functions of a module."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_is_on_its_page_and_has_a_test(page):
    text = " ".join((ROOT / page).read_text().split())
    for promise, test in PROMISES[page].items():
        file, _, name = test.partition("::")
        assert promise in text, f"{page} does not promise any more: {promise}"
        assert name in functions(file), f"{test} is not there; it held: {promise}"
