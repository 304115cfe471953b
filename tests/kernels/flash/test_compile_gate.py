"""Every Triton kernel that attention launches compiles for sm_90 without spilling registers and
within its shared memory; no GPU is needed. What is kept of the same kernels, arguments and Triton
is not compiled anew, but for one; `python tests/kernels/compiled_kernels.py --record` keeps it."""

from __future__ import annotations

import platform

import pytest

if platform.system() != "Linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

from compiled_kernels import HEAD_DIMS, Launch, compilers, launches, recorded

SHARED_BYTES = 232_448
"""What a program may have on sm_90 (227 KB)."""


# About 2 s of CPU per kernel. `compiled_kernels.py --every` compiles all that there are.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", list(HEAD_DIMS))
def test_no_spills(dtype):
    wanted = launches(dtype)
    kept = recorded(wanted)
    sample = next(launch for launch in wanted if launch.kernel == "attention_forward")
    changed = [launch for launch in wanted if launch not in kept]
    with compilers() as compile_all:
        compiled = {report.launch: report for report in compile_all({*changed, sample})}
    # What is kept is what this compiler makes.
    assert kept.get(sample, compiled[sample]) == compiled[sample]
    reports = [*(kept | compiled).values()]
    assert len(reports) == len(wanted) >= 9
    wrong = [r for r in reports if r.spills or r.shared > SHARED_BYTES]
    assert not wrong, "\n".join(map(str, wrong))
    large = [r for r in reports if r.launch.kernel.startswith("attention")]
    if dtype != "float32":
        assert all(report.tensor_cores for report in large)


def test_the_gate_sees_spills_and_shared_memory():
    """With half the threads registers spill; six tiles in flight take more memory than there
    is."""
    launch = Launch("attention_forward", "bfloat16", 128)
    with compilers(1) as compile_all:
        (spilling,) = compile_all([launch], num_warps=4, N=128)
        (large,) = compile_all([launch], num_stages=6, N=128)
    assert spilling.spills > 0
    assert large.shared > SHARED_BYTES
