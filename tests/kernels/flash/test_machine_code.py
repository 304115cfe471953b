"""Machine code of the large attention kernels.

They use tensor cores with the widest products that their registers allow, load tiles by the tensor
memory accelerator, and spill nothing. Stored results of unchanged kernels and Triton are reused
(`python tests/kernels/machine_code.py --record`).
"""

from __future__ import annotations

import importlib.metadata
import platform

import pytest

if platform.system() != "Linux":
    pytest.skip("triton is for Linux", allow_module_level=True)

from packaging.version import Version

from tests.kernels.machine_code import HEAD_DIMS, KERNELS, MachineCode, counts, found, targets
from tests.kernels.triton_versions import PAGE, VERSIONS, read_table, record, table

SHARED_BYTES = 232_448
"""Limit of a program on sm_90 and sm_100 (227 KB)."""
LEAST_COLUMNS = {("attention_backward_query", 256): 32, ("attention_backward_key", 256): 32}
"""Columns of the narrowest product, if not 64.

Accumulators of 256 columns leave no registers for wider tiles of scores.
"""


@pytest.fixture(scope="module")
def codes():
    return found(targets())


@pytest.mark.timeout(900)
def test_nothing_spills_and_shared_memory_fits(codes):
    # At 256 columns gradients of keys and values are a launch each; two unordered ones on sm_90.
    assert len(codes) == 2 * (len(HEAD_DIMS) * len(KERNELS) + 1) + 2
    wrong = [(t, c) for t, c in codes.items() if c.spills or c.local or c.shared > SHARED_BYTES]
    assert not wrong, "\n".join(map(str, wrong))


def test_products_are_wide_and_use_warp_groups(codes):
    for (launch, architecture), code in codes.items():
        assert code.products and not any(name.startswith("HMMA") for name in code.products), launch
        least = LEAST_COLUMNS.get((launch.kernel, launch.head_dim), 64)
        assert code.least_n == least or code.least_n > least == 64, (launch, code.products)
        if architecture == 90:
            assert code.waits, "products of a warp group are waited for"
        else:
            assert all(name.startswith("UTC") for name in code.products), (launch, code.products)


def test_products_of_a_tile(codes):
    """Count products of a tile.

    Two forward; three for the query's gradient and four for those of keys and values (three and two
    if they are a launch each); five for all gradients, in any order. Every kernel has a loop for
    full tiles and one for partial ones; for sm_100 the compiler also peels off some first
    iterations.
    """
    for (launch, architecture), code in codes.items():
        expected = {"attention_forward": 2, "attention_backward_query": 3}.get(launch.kernel)
        if expected is None:
            expected = 4 if launch.head_dim < 256 else (2, 3)[launch.key_pass]
            expected += launch.unordered
            assert bool(code.loads.get("UTMAREDG")) == launch.unordered
        found = sum(code.tiles.values())
        assert found == 2 * expected or found > 2 * expected and architecture > 90, launch


def test_tiles_are_loaded_by_descriptors(codes):
    """Check that threads copy only tables with a value per row themselves, not tiles."""
    for (launch, architecture), code in codes.items():
        assert code.loads.get("UTMALDG", 0) >= 3, (launch, code.loads)
        if architecture == 90:
            assert "LDGSTS.E.BYPASS.128" not in code.loads, (launch, code.loads)


def test_the_narrowest_product_is_found():
    code = MachineCode(1, 1, 0, 0, {}, {"HGMMA.64x128x16": 8, "HGMMA.64x32x16": 2})
    assert code.least_n == 32 and MachineCode(1, 1, 0, 0, {}, {"UTCHMMA": 4}).least_n == 0
    assert MachineCode(1, 1, 0, 0, {"128x64x16": 2}, {"UTCHMMA": 4}).least_n == 64


def test_products_of_a_tile_are_awaited_together(codes):
    """Count waits, at most one per product of a tile.

    A product consists of several instructions, which are in flight together. If the assembler
    cannot keep accumulators in flight, it waits for every instruction, at least four times as
    often.
    """
    for name, (products, waits, _) in counts(codes).items():
        assert 0 < waits <= products, (name, waits, products)


def test_the_pages_table_is_that_of_the_supported_versions(codes):
    """Compare the installed version; `triton_versions.py --record` writes the table.

    All versions wait equally seldom.
    """
    found = read_table(PAGE.read_text())
    assert (*found,) == VERSIONS
    mine = Version(importlib.metadata.version("triton"))
    same = [version for version in found if Version(version).release[:2] == mine.release[:2]]
    assert same, f"triton {mine} is not in the table of docs/gpus.md"
    assert found[same[0]] == counts(codes)
    for version, kernels in found.items():
        assert all(waits <= products for products, waits, _ in kernels.values()), version


@pytest.mark.parametrize("after", ["", "\nText below.\n"])
def test_the_pages_table_is_replaced(tmp_path, monkeypatch, after):
    """Replace a table within a page, and one that ends the page."""
    page = tmp_path / "gpus.md"
    page.write_text(f"Text above.\n\n| kernel and head dim | 3.5.1 |\n| --- | --- |\n{after}")
    monkeypatch.setattr("tests.kernels.triton_versions.PAGE", page)
    counted = {"3.8.0": {"forward 64": (4, 3, 0)}, "3.9.0": {"forward 64": (6, 6, 48)}}
    record(table(counted))
    text = page.read_text()
    assert read_table(text) == counted
    assert text.startswith("Text above.\n\n|") and text.endswith(f"(48 B) |\n{after}")
