"""Query, key and value are cast under autocast, and rejected if they do not fit one another."""

from __future__ import annotations

import pytest
import torch

from raymm.kernels.flash.operands import as_autocast, prepare


def tensors(query=(2, 4, 5, 8), key=(2, 2, 7, 8), value=(2, 2, 7, 6), dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in (query, key, value)]


def test_tensors_that_fit_are_returned_unchanged():
    given = tensors()
    for one, other in zip(prepare(*given, None), given, strict=True):
        assert one is other


def test_autocast_decides_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        for found in (*prepare(*tensors(), None), *as_autocast(*tensors())):
            assert found.dtype == torch.bfloat16
        mixed = [*tensors()[:2], tensors(dtype=torch.float16)[2]]
        assert {t.dtype for t in prepare(*mixed, None)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": (4, 5, 8)}, r"expected \(B, H, T, D\)"),
        ({"value": (2, 2, 6, 6)}, "keys and values of the same tokens"),
        ({"query": (3, 4, 5, 8)}, "batch and head dim must agree"),
        ({"query": (2, 4, 5, 9)}, "batch and head dim must agree"),
        ({"query": (2, 3, 5, 8)}, "query heads must be a multiple of key heads"),
        ({"key": (2, 0, 7, 8), "value": (2, 0, 7, 6)}, "multiple of key heads"),
        ({"dtype": torch.int64}, "expected one floating dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(*tensors(**changes), None)


def test_mixed_dtypes_and_softcaps_are_rejected():
    with pytest.raises(ValueError, match="got torch.float32, torch.float32, torch.float16"):
        prepare(*tensors()[:2], tensors(dtype=torch.float16)[2], None)
    with pytest.raises(ValueError, match="softcap must be positive, got -1"):
        prepare(*tensors(), -1.0)
