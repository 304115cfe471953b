"""Every Triton kernel of attention compiles for sm_90 without spills, within shared memory.

No GPU is needed. Stored results of unchanged kernels, arguments and Triton are reused, except for
one sample; `python tests/kernels/compiled_kernels.py --record` stores them.
"""

from __future__ import annotations

import platform

import pytest

if platform.system() != "Linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

from tests.kernels.compiled_kernels import HEAD_DIMS, Launch, compilers, launches, recorded
from tests.kernels.machine_code import recorded as recorded_code
from tests.kernels.machine_code import targets

SHARED_BYTES = 232_448
"""Limit of a program on sm_90 (227 KB)."""


# About 2 s of CPU per kernel. `compiled_kernels.py --every` compiles all variants.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", list(HEAD_DIMS))
def test_no_spills(dtype):
    wanted = launches(dtype)
    kept = recorded(wanted)
    sample = next(launch for launch in wanted if launch.kernel == "attention_forward")
    changed = [launch for launch in wanted if launch not in kept]
    with compilers() as compile_all:
        compiled = {report.launch: report for report in compile_all({*changed, sample})}
    # The stored results are those of this compiler.
    assert kept.get(sample, compiled[sample]) == compiled[sample]
    reports = [*(kept | compiled).values()]
    assert len(reports) == len(wanted) >= 9
    wrong = [r for r in reports if r.spills or r.shared > SHARED_BYTES]
    assert not wrong, "\n".join(map(str, wrong))
    large = [r for r in reports if r.launch.kernel.startswith("attention")]
    if dtype != "float32":
        assert all(report.tensor_cores for report in large)


def test_stored_results_are_current():
    """Check that results are stored again after a change of a kernel, a local variable's name or
    Triton. Otherwise every run of the tests compiles all kernels, for minutes."""
    remedy = "run `python tests/kernels/{}.py --record`"
    wanted = [launch for dtype in HEAD_DIMS for launch in launches(dtype)]
    assert recorded(wanted).keys() == set(wanted), remedy.format("compiled_kernels")
    assert recorded_code(targets()).keys() == set(targets()), remedy.format("machine_code")


def test_the_gate_sees_spills_and_shared_memory():
    """Spill registers with half the threads; exceed shared memory with six tiles in flight."""
    launch = Launch("attention_forward", "bfloat16", 128)
    with compilers(1) as compile_all:
        (spilling,) = compile_all([launch], num_warps=4, N=128)
        (large,) = compile_all([launch], num_stages=6, N=128)
    assert spilling.spills > 0
    assert large.shared > SHARED_BYTES
