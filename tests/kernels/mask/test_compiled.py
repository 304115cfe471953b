"""Loops run compiled if numba is installed, and in Python otherwise, with the same results."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from raymm.kernels.mask.compiled import compiled


def last_above(values, limit):
    found = -1
    for i in range(len(values)):
        if values[i] > limit:
            found = i
    return found


def test_compiled_code_returns_the_same():
    pytest.importorskip("numba")
    function = compiled(last_above)
    assert function is not last_above
    values = np.random.default_rng(0).integers(0, 9, 100)
    assert [function(values, n) for n in range(10)] == [last_above(values, n) for n in range(10)]


def test_masks_work_without_numba():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from raymm.kernels.mask.compiled import compiled\n"
        "from raymm.kernels.mask.patterns import causal\n"
        "from raymm.kernels.mask.tiles import key_runs\n"
        "assert compiled(len) is len\n"
        "print(key_runs(causal(64), 16, 16).work.tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    from raymm.kernels.mask.patterns import causal
    from raymm.kernels.mask.tiles import key_runs

    assert run.stdout.strip() == str(key_runs(causal(64), 16, 16).work.tolist()), run.stderr
