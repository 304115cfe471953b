"""``raymm doctor`` on gloo: its output, and corrupted messages."""

import re

import pytest
import torch

from raymm.actors.rank.doctor import DoctorSpec, _check
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


def test_every_process_makes_its_links_in_the_same_order():
    for count in range(1, 6):
        specs = [DoctorSpec(rank, count, "cpu", 1.0) for rank in range(count)]
        links = [link for spec in specs for link in list(spec.members.items())[1:]]
        assert all(links.count(link) == 2 for link in links)
        assert len(links) == (2 * count if count > 1 else 0)
        assert all(list(spec.members) == sorted(spec.members) for spec in specs)


def test_values_that_are_not_those_sent_are_counted():
    with pytest.raises(RuntimeError, match="a message has 2 of 5 values wrong"):
        _check(torch.tensor([1.0, 0.0, 1.0, 1.0, float("nan")]), 1.0, "a message")
