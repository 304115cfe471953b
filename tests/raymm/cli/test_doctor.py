"""``raymm doctor`` on gloo: its output, and corrupted messages."""

import re

import pytest

from raymm.cli.main import main


def test_the_ring_and_the_all_reduce_are_measured(ray_cluster, capsys):
    assert main(["doctor", "--device", "cpu", "--processes", "3", "--megabytes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "3 processes on 1 node, cpu, over gloo" in printed
    for rank in range(3):
        row = rf"\b{rank} +\S+ +none +0 +{(rank - 1) % 3} \(the same node\) +[\d.]+"
        assert re.search(row, printed), printed
    assert re.search(r"all-reduce of 1 MB over all processes: [\d.]+ GB/s", printed)
    assert "all messages arrived as they were sent" in printed
    assert re.search(r"\bnone +\S+ +none +lo, lo +\d+ GiB +[\d.]+ of [\d.]+ GiB", printed)


@pytest.mark.parametrize("option", ["--processes", "--megabytes"])
def test_numbers_below_one_are_refused(capsys, option):
    assert main(["doctor", option, "0"]) == 2
    assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err
