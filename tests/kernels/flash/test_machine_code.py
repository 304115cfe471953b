"""The large attention kernels in machine code: on tensor cores in the widest products that their
registers allow, tiles copied without threads waiting for them, nothing spilled. What is kept of the
same kernels and Triton is not compiled anew (`python tests/kernels/machine_code.py --record`)."""

from __future__ import annotations

import platform

import pytest

if platform.system() != "Linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

from machine_code import HEAD_DIMS, KERNELS, MachineCode, found, targets

SHARED_BYTES = 232_448
"""What a program may have on sm_90 and sm_100 (227 KB)."""
LEAST_COLUMNS = {"attention_backward_key": 32}
"""Of a warp group's products, where not 64: both gradients' accumulators leave registers for
tiles of 32 rows only."""


@pytest.fixture(scope="module")
def codes():
    return found(targets())


@pytest.mark.timeout(900)
def test_nothing_spills_and_shared_memory_fits(codes):
    assert len(codes) == 2 * len(HEAD_DIMS) * len(KERNELS)
    wrong = [(t, c) for t, c in codes.items() if c.spills or c.local or c.shared > SHARED_BYTES]
    assert not wrong, "\n".join(map(str, wrong))


def test_products_are_wide_and_none_is_a_warps_own(codes):
    for (launch, architecture), code in codes.items():
        assert code.products and not any(name.startswith("HMMA") for name in code.products), launch
        if architecture == 90:
            least = LEAST_COLUMNS.get(launch.kernel, 64)
            assert code.least_n >= least, (launch, code.products)
            assert code.waits, "products of a warp group are waited for"
        else:
            assert all(name.startswith("UTC") for name in code.products), (launch, code.products)


def test_tiles_are_copied_asynchronously_in_whole_vectors(codes):
    for target, code in codes.items():
        wide = code.loads.get("UTMALDG", 0) + code.loads.get("LDGSTS.E.BYPASS.128", 0)
        assert wide >= 8, (target, code.loads)


def test_the_narrowest_product_is_found():
    code = MachineCode(1, 1, 0, 0, {"HGMMA.64x128x16": 8, "HGMMA.64x32x16": 2})
    assert code.least_n == 32 and MachineCode(1, 1, 0, 0, {"UTCHMMA": 4}).least_n == 0
