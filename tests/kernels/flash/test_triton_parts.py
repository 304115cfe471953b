"""Merged Triton attention over parts of the keys equals attention over all keys.

Attention over several processes on GPUs does the same.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu.attention_case import Case, part_errors
from benchmarks.gpu.every_mask import every_pattern
from tests.support.interpreted_triton import device


@pytest.mark.parametrize("pattern", ["mp_isolated", "own_image_window", "cross"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_merge_to_the_whole(triton_worker, pattern, softcap):
    mask = every_pattern(144)[pattern]()
    case = Case((mask,), heads=(2, 1), softcap=softcap)
    found = triton_worker(part_errors, case, device(), mask.n_keys // 3)
    assert max(found.values()) <= 1e-5, found
