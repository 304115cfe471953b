"""Processes of ``raymm doctor``: their links, and the check of messages."""

import pytest
import torch

from raymm.actors.rank.doctor import DoctorSpec, _check


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
