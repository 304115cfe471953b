"""Noise of samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.modules.noise import SampleSeeds, drawn, normal_noise, uniform_noise
from raymm.errors import InputError
from raymm.scheduler.graph.sample_ranges import Range, share

KINDS = st.sampled_from([normal_noise("x"), uniform_noise("x"), normal_noise(), uniform_noise()])


@given(
    KINDS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3),
    st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)  # fmt: skip
def test_any_layout_has_the_same_bits(noise, sizes, replicas, step, dtype):
    """Use microbatches of any sizes, partly sharded over replicas."""
    seeds = SampleSeeds(7, step, 0)
    whole = {"x": torch.zeros(sum(sizes), 3, dtype=dtype)}
    due = drawn(noise, whole, Range(0, sum(sizes)), seeds, "head", "noise")
    parts, first = [], 0
    for size in sizes:
        for index in range(replicas):
            own = share(size, index, replicas)
            arguments = {"x": torch.zeros(own.size, 3, dtype=dtype)}
            parts.append(
                drawn(noise, arguments, own, seeds._replace(first=first), "head", "noise")
            )
        first += size
    assert torch.equal(torch.cat(parts), due)
    assert due.shape == ((sum(sizes), 3) if noise.like else (sum(sizes),))
    assert due.dtype == (dtype if noise.like and dtype.is_floating_point else torch.float32)


def test_samples_steps_modules_and_arguments_differ():
    x = {"x": torch.zeros(4, 2000)}
    own = Range(0, 4)
    one = drawn(normal_noise("x"), x, own, SampleSeeds(), "head", "noise")
    others = [
        drawn(normal_noise("x"), x, own, SampleSeeds(), "head", "other"),
        drawn(normal_noise("x"), x, own, SampleSeeds(), "decoder", "noise"),
        *(
            drawn(normal_noise("x"), x, own, SampleSeeds(*seeds), "head", "noise")
            for seeds in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
        ),
    ]
    rows = torch.cat([one, *others])
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.1
    assert abs(rows.mean()) < 0.02 and abs(rows.std() - 1) < 0.02
    flat = drawn(uniform_noise("x"), x, own, SampleSeeds(), "head", "noise")
    assert 0 <= flat.min() and flat.max() < 1 and abs(flat.mean() - 0.5) < 0.02


def test_like_must_be_a_tensor():
    with pytest.raises(InputError, match="is like 'x', a dict; accepted: an argument that is"):
        drawn(normal_noise("x"), {"x": {}, "y": torch.ones(2)}, Range(0, 2), SampleSeeds(), "m")
