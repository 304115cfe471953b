"""Resources of a rank."""

import math

import pytest

from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import ClusterError


def test_a_bundle_has_what_is_above_zero():
    assert RankResources(0.5, 0, {"slot": 2}).bundle() == {"CPU": 0.5, "slot": 2}
    assert RankResources(0, 1).bundle() == {"GPU": 1}


@pytest.mark.parametrize(("fields", "message"), [
    ({"cpus": -1}, "cpus is -1; it must be a finite number"),
    ({"gpus": True}, "gpus is True"), ({"custom": {"slot": math.nan}}, "slot is nan"),
    ({"custom": {"slot": math.inf}}, "slot is inf"),
    ({"custom": {"GPU": 1}}, "give cpus or gpus instead"),
    ({"cpus": 0}, "a rank would reserve nothing"),
    ({"env": {"A=B": "1"}}, "resources.env has 'A=B'"), ({"env": {"A": 1}}, "has 'A': 1"),
    ({"env": {"": "1"}}, "non-empty names"), ({"env": {"A": "\0"}}, "without NUL"),
])
def test_an_invalid_field_is_named(fields, message):
    with pytest.raises(ClusterError, match=message):
        RankResources(**fields)


@pytest.mark.parametrize("gpus", [0, 0.5, 2])
def test_a_rank_on_a_gpu_has_exactly_one(gpus):
    resources = RankResources(gpus=gpus)
    resources.check_device("cpu")
    with pytest.raises(ClusterError, match=f"gpus is {gpus:g} with device 'cuda'; accepted: 1"):
        resources.check_device("cuda")
    RankResources(gpus=1).check_device("cuda")
