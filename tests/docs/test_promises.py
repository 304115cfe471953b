"""Promises of the pages about faults and hostile input, each with the test that checks it.

The tests are named by file and function, and run in their own files. After a promise is reworded,
compare it with its test again.
"""

import ast
import functools
import re

import pytest

from tests.house import ROOT

PROMISES = {
    "docs/checkpoints.md": {
        "the last step always writes one":
            "tests/training/test_saved_steps.py::"
            "test_the_last_step_is_saved_without_frozen_weights",
        "It does not contain frozen modules that can be read again from their source.":
            "tests/training/test_saved_steps.py::"
            "test_the_last_step_is_saved_without_frozen_weights",
        "steps stop until a checkpoint is committed":
            "tests/training/test_saved_steps.py::"
            "test_steps_wait_for_synchronous_checkpoints",
        "also on NFS":
            "tests/raymm/storage/test_run_owner.py::test_a_link_request_repeated_by_nfs_succeeds",
        "Removing a checkpoint removes only the files that its manifest names.":
            "tests/raymm/storage/test_links.py::"
            "test_link_targets_and_other_files_in_a_step_are_kept",
        "A symbolic link is removed and its target is kept.":
            "tests/raymm/storage/test_links.py::test_removing_a_linked_step_removes_only_the_link",
        "that cannot be written stay in memory and are written, in order, with the first later row":
            "tests/raymm/monitor/test_metrics.py::test_rows_stay_in_memory_while_the_disk_is_full",
        "The run continues and saves when the next checkpoint is due":
            "tests/training/test_full_disk.py::"
            "test_a_full_disk_loses_no_step_and_no_row",
        "verified before use and committed by a manifest that comes last":
            "tests/raymm/storage/test_manifest.py::"
            "test_every_effective_mutation_is_reported",
        "A corrupt checkpoint is reported, and the newest intact one is used.":
            "tests/raymm/storage/test_manifest.py::"
            "test_a_run_resumes_from_the_newest_intact_checkpoint",
        "Nothing is ever unpickled.":
            "tests/training/test_planted_attacks.py::"
            "test_a_pickled_shard_with_a_valid_checksum_is_rejected",
        "a resumed run repeats the uninterrupted one, data included":
            "tests/training/test_resume.py::test_two_halves_equal_an_uninterrupted_run_bitwise",
        "is rejected unless `run.allow_changes` names it":
            "tests/raymm/storage/test_resuming.py::"
            "test_forbidden_changes_are_rejected_with_both_values",
        "a run may resume with other stages, degrees or replicas":
            "tests/training/test_resume.py::"
            "test_another_layout_resumes_from_the_same_checkpoint",
        "a second run is rejected while the first lives":
            "tests/raymm/storage/test_run_owner.py::"
            "test_a_concurrent_command_is_rejected_with_the_owner",
        "a save that begins before the previous one is committed waits":
            "tests/raymm/storage/test_checkpoint.py::"
            "test_a_second_save_waits_and_reports_it",
        "Whichever process is killed at any moment, the newest intact checkpoint is the old one or":
            "tests/raymm/storage/test_checkpoint.py::"
            "test_a_killed_save_leaves_an_intact_checkpoint",
        "The third failure in a row ends the run":
            "tests/raymm/storage/test_checkpoint.py::"
            "test_the_third_failed_save_in_a_row_ends_the_run",
        "a run that resumes on another machine downloads them first":
            "tests/raymm/storage/test_run_folder.py::"
            "test_a_bucket_gets_changes_and_restores_them",
        "Failed requests are retried, after waits of":
            "tests/actors/storage/test_bucket.py::"
            "test_temporary_failures_are_retried",
        "prints a line for each: `whole`, `CORRUPT` (with the file and the reason), or `torn`":
            "tests/raymm/storage/test_inspection.py::"
            "test_check_reports_corrupt_files_and_accepts_torn_saves",
        "also removes all but the newest intact one, unless a run is active in the folder":
            "tests/raymm/storage/test_inspection.py::test_pruning_keeps_the_newest_intact_checkpoints",
        "Each tensor is stored in the dtype of the source folder":
            "tests/raymm/storage/test_export.py::test_each_tensor_keeps_its_own_dtype",
        "or the command fails and leaves no folder":
            "tests/raymm/storage/test_export.py::"
            "test_a_folder_that_reads_back_differently_is_refused",
        "Exporting an exported folder gives the same bytes.":
            "tests/raymm/storage/test_export.py::"
            "test_an_untrained_model_is_written_byte_for_byte",
        "A folder that has other files in it is renamed":
            "tests/raymm/storage/test_links.py::test_a_linked_run_folder_keeps_its_neighbours",
        "a run that ends before that ends with an error":
            "tests/raymm/monitor/test_metrics.py::test_rows_stay_in_memory_while_the_disk_is_full",
        "wait for it, too; a second signal does not":
            "tests/raymm/training/test_stop_request.py::test_a_signal_during_a_save_and_a_second_one",
        "is reported, with the file, and earlier checkpoints stay":
            "tests/raymm/storage/test_checkpoint.py::"
            "test_a_failed_write_is_reported_and_loses_nothing",
        "The second prints which tensors differ, and by how much relative to their norm":
            "tests/raymm/storage/test_inspection.py::test_differences_are_relative_and_grouped_by_kind",
        "whatever layouts the checkpoints were written under":
            "tests/raymm/storage/test_inspection.py::test_comparison_ignores_layouts",
        "is 1 if a checkpoint is corrupt or the two differ":
            "tests/raymm/storage/test_inspection.py::"
            "test_checkpoints_of_a_run_differ_in_trained_parameters",
        "becomes a folder that stock `peft` loads":
            "tests/raymm/storage/test_adapter_folder.py::"
            "test_peft_computes_the_same_with_either_scaling",
        "`bfloat16` or `float16` stores all tensors in that dtype":
            "tests/raymm/storage/test_export.py::test_another_dtype_is_written_on_request",
        "are loaded without quantization and cannot be written in their own format":
            "tests/raymm/storage/test_export.py::"
            "test_an_fp8_folder_is_written_without_quantisation",
        "Other quantized folders are rejected before a run starts":
            "tests/raymm/storage/test_export.py::"
            "test_other_quantised_folders_are_refused_by_method",
        "the exported configuration has `tie_word_embeddings: false`":
            "tests/raymm/storage/test_export.py::"
            "test_a_merged_head_is_not_tied_to_the_embedding",
    },
    "docs/clusters.md": {
        "a second process prints a message on the standard error":
            "tests/raymm/training/test_last_words.py::"
            "test_only_processes_without_a_message_get_one",
        "SIGTERM before that still finishes the step, saves, and ends with 143":
            "tests/training/test_lost_servers.py::test_a_lost_server_ends_the_run",
        "SIGTERM ends it with 143 within 10 s, even if a call to Ray does not return":
            "tests/training/test_lost_servers.py::test_a_lost_server_ends_the_run",
        "ends with code 1; the message comes from the run, or from the second process":
            "tests/training/test_lost_servers.py::test_a_lost_server_ends_the_run",
        "reports the kind of the error, also during startup":
            "tests/actors/faults/test_failure_kind.py::"
            "test_rays_own_errors_of_constructors_have_the_kind",
        "retries the step after 1, 5 and 25 seconds":
            "tests/raymm/recovery/test_failure_policy.py::"
            "test_retries_back_off_until_a_step_finishes",
        "by the type of the error and of what it was raised from":
            "tests/actors/faults/test_failure_kind.py::test_kinds_of_real_faults",
        "A command that begins while the disk of its folder is full ends with code 1":
            "tests/training/test_full_disk.py::"
            "test_a_start_on_a_full_disk_exits_with_1_and_no_files",
        "in one step ends the run with code 1":
            "tests/raymm/recovery/test_run_controller.py::"
            "test_a_lasting_shortage_ends_the_run_after_retries",
        "resource is never skipped, whatever `data.on_error` is":
            "tests/raymm/recovery/test_run_controller.py::test_temporary_shortages_do_not_change_any_loss",
    },
    "docs/security.md": {
        "run only with `model.trust_remote_code: true`":
            "tests/actors/weights/test_custom_code.py::"
            "test_unknown_classes_are_refused_with_file_and_option",
        "checkpoints are safetensors and JSON, and nothing is ever unpickled":
            "tests/training/test_planted_attacks.py::"
            "test_a_pickled_shard_with_a_valid_checksum_is_rejected",
        "scripts that it contains are not run":
            "tests/actors/weights/test_pretrained_source.py::test_a_script_of_a_data_set_is_not_run",
        "with `..` resolved before it is compared":
            "tests/raymm/data/remote/test_store.py::"
            "test_media_of_rows_lie_below_the_sources_url",
        "is rejected with an error that names the target":
            "tests/raymm/data/samples/test_folders.py::"
            "test_a_file_that_is_a_link_is_refused_when_it_is_read",
        "decodes only the codecs that are listed":
            "tests/raymm/data/video/test_container.py::test_nothing_else_is_opened",
        "Checkpoints are read through links":
            "tests/actors/storage/test_folder.py::"
            "test_files_are_read_up_to_a_size_and_through_links",
        "listens on this machine only":
            "tests/training/test_failure.py::"
            "test_repeated_interruptions_do_not_change_the_run",
        "scans with NumPy's format without objects":
            "tests/raymm/data/sampling/test_scanner.py::test_nothing_is_unpickled",
        "settings and safetensors are downloaded, no pickles":
            "tests/actors/weights/test_pretrained_source.py::test_a_model_and_rows_train_by_their_ids",
        "never with connection options or credentials from the row":
            "tests/raymm/data/remote/test_store.py::"
            "test_media_of_rows_lie_below_the_sources_url",
        "which gets none of the credentials":
            "tests/raymm/data/remote/test_store.py::test_a_redirect_gets_no_credentials",
        "redirects to `http://` are not followed":
            "tests/raymm/data/remote/test_store.py::"
            "test_servers_that_refuse_are_named_before_anything_starts",
        "Certificates are verified.":
            "tests/raymm/data/remote/test_store.py::"
            "test_a_certificate_of_another_server_is_refused",
        "must be within the source's folder, with links followed":
            "tests/raymm/data/samples/test_folders.py::"
            "test_a_file_that_is_a_link_is_refused_when_it_is_read",
        "hold before anything is decoded":
            "tests/raymm/data/samples/test_headers.py::test_large_files_are_refused_unread",
        "are rejected by their header":
            "tests/raymm/data/samples/test_headers.py::test_images_are_refused_by_their_headers",
        "They run in Jinja's sandbox":
            "tests/raymm/data/conversations/test_template.py::"
            "test_templates_cannot_reach_python_objects",
        "no playlist makes it open other files or URLs":
            "tests/raymm/data/video/test_container.py::test_nothing_else_is_opened",
        "makes no frame larger than `data.max_image_pixels`":
            "tests/raymm/data/video/test_container.py::test_large_frames_are_refused_by_the_header",
        "find damage, not forgery":
            "tests/raymm/storage/test_manifest.py::"
            "test_edits_with_a_valid_checksum_are_rejected_or_read",
        "raymm does not use torch's own store (TCPStore)":
            "tests/actors/rank/test_rendezvous.py::"
            "test_a_stranger_who_scans_ports_finds_no_store",
        "every overlay of `deploy/` has a `NetworkPolicy`":
            "tests/deploy/test_check.py::test_shipped_files_are_valid",
        "more than a million times for one sample is rejected with that sample":
            "tests/raymm/data/conversations/test_template.py::test_endless_templates_are_refused",
        "is rejected before it is tokenized":
            "tests/raymm/data/samples/test_rows.py::test_a_row_with_too_much_text_is_refused",
        "which raymm switches on unless `RAY_AUTH_MODE` is set":
            "tests/raymm/runtime/test_cluster.py::test_an_embedded_ray_requires_a_token",
        "have the permissions that the `umask` of the process leaves":
            "tests/raymm/storage/test_run_folder.py::"
            "test_checkpoint_files_follow_the_umask",
        "is read only if it is a regular file, and up to a size":
            "tests/actors/storage/test_folder.py::test_only_regular_files_are_read",
        "is reported, and never waited for":
            "tests/raymm/storage/test_odd_checkpoints.py::"
            "test_an_invalid_checkpoint_is_reported_and_others_are_used",
        "cannot be listed is reported in one line; the others are used":
            "tests/raymm/storage/test_odd_checkpoints.py::test_an_unreadable_folder_is_reported",
        "name that leads to another folder is rejected":
            "tests/actors/weights/test_stored_weights.py::"
            "test_an_index_names_files_of_its_folder_only",
        "it removes the link and keeps the link's target":
            "tests/raymm/storage/test_links.py::test_removing_a_linked_step_removes_only_the_link",
    },
}


# Pages where every list item with a title is a promise.
TITLED = re.compile(r"^- \*\*(.+?)\*\*.*?(?=^- |^\n|^#|\Z)", re.MULTILINE | re.DOTALL)
WHOLE_PAGES = ("docs/checkpoints.md", "docs/security.md")


@pytest.mark.parametrize("page", WHOLE_PAGES)
def test_every_titled_item_has_a_promise_with_a_test(page):
    items = list(TITLED.finditer((ROOT / page).read_text()))
    assert items
    for item in items:
        text = " ".join(item[0].split())
        assert any(promise in text for promise in PROMISES[page]), f"{page}: {item[1]}"


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Return the names of the functions of a module."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_is_on_its_page_and_has_a_test(page):
    text = " ".join((ROOT / page).read_text().split())
    for promise, test in PROMISES[page].items():
        file, _, name = test.partition("::")
        assert promise in text, f"{page} does not promise any more: {promise}"
        assert name in functions(file), f"{test} is not there; it held: {promise}"
