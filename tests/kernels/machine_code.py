"""Machine code (SASS) of the large attention kernels, for sm_90 and sm_100.

Reports the shapes of their tensor-core products, their waits, loads and spills. Read by the
disassembler in Triton's wheel; no GPU is needed. The results are stored in ``machine_code.json``,
as in :mod:`compiled_kernels`.

    python tests/kernels/machine_code.py --record   # writes the file and prints a table
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.kernels.compiled_kernels import (
    Launch,
    compile_for,
    compilers,
    digest,
    kernel_sources,
    launches,
)

RECORD = Path(__file__).with_suffix(".json")
ARCHITECTURES = (90, 100)
KERNELS = ("attention_forward", "attention_backward_query", "attention_backward_key")
HEAD_DIMS = (64, 128, 256)
# Products on tensor cores: of a warp group (sm_90), of a thread block (sm_100), of a warp (slow).
_PRODUCTS = re.compile(r"\b(HGMMA\.\d+x\d+x\d+|UTC[A-Z]*MMA|HMMA\.\d+)")
_LOADS = re.compile(r"\b(UTMALDG|UTMAREDG|LDGSTS\.E\.BYPASS\.128|LDGSTS)\b")
_WAITS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
# Products of full tiles in Triton's own form, in shared memory or registers (m x k, k x n).
_TILES = re.compile(
    r"ttng\.(?:warp_group_dot|tc_gen5_mma) [^\n]* : [^\n<]*<(\d+)x(\d+)x[^\n]*?memdesc<(\d+)x(\d+)x"
)
_LOCAL = re.compile(r"\b(?:STL|LDL)[.\s]")


class Target(NamedTuple):
    """Launch, compiled for an architecture."""

    launch: Launch
    architecture: int


@dataclass(frozen=True)
class MachineCode:
    """Disassembly of one kernel.

    Attributes:
        registers, shared: per thread, and bytes per program.
        spills: bytes reported by ptxas; ``local`` instructions that read or write them.
        tiles: products of full tiles as m x n x k, of all loops: a kernel has one for full tiles
            and one for partial ones.
        products: tensor-core instructions by name; those of sm_90 with m x n x k.
        loads: instructions that copy tiles into shared memory: by TMA (``UTMALDG``), or by threads,
            16 bytes each (``LDGSTS.E.BYPASS.128``) or fewer; and those that add to memory by TMA
            (``UTMAREDG``).
        waits: waits of sm_90 for products in flight, by the number that may remain: 0 waits for
            all.
    """

    registers: int
    shared: int
    spills: int
    local: int
    tiles: dict[str, int] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)

    @property
    def least_n(self) -> int:
        """Return the columns of the narrowest product; 0 without products.

        For sm_90 of a warp group's product, for sm_100 of a tile's, since the names of its
        instructions do not contain it.
        """
        shapes = [name.split("x") for name in self.products if name.startswith("HGMMA")]
        shapes = shapes or [name.split("x") for name in self.tiles]
        return min((int(shape[1]) for shape in shapes), default=0)


def targets() -> list[Target]:
    """Return the tested targets: bf16, masks with kinds (a superset), tiles by descriptors."""
    return [
        Target(launch, architecture)
        for architecture in ARCHITECTURES
        for launch in launches("bfloat16", HEAD_DIMS)
        if launch.kernel in KERNELS and launch.bits and launch.descriptors and not launch.softcap
        if architecture == 90 or not launch.unordered  # only exists for sm_90
    ]


def read(target: Target) -> MachineCode:
    """Compile and disassemble."""
    import triton

    compiled, registers, spills = compile_for(target.launch, ("cuda", target.architecture, 32))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    code = run.stdout
    shapes = (f"{m}x{n}x{k}" for m, k, _, n in _TILES.findall(compiled.asm["ttgir"]))
    return MachineCode(
        registers, compiled.metadata.shared, spills, len(_LOCAL.findall(code)),
        dict(Counter(shapes)),
        dict(Counter(_PRODUCTS.findall(code))), dict(Counter(_LOADS.findall(code))),
        dict(Counter(_WAITS.findall(code))),
    )  # fmt: skip


def key(target: Target, sources: Mapping[str, str]) -> str:
    """Return the digest of all inputs of a target."""
    return digest(target.launch, sources, ("cuda", target.architecture, 32))


def recorded(wanted: list[Target]) -> dict[Target, MachineCode]:
    """Return stored results whose kernels, arguments and compiler are unchanged."""
    rows = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    kept = {row["digest"]: MachineCode(**row["code"]) for row in rows}
    sources = kernel_sources()
    digests = {target: key(target, sources) for target in wanted}
    return {target: kept[digest] for target, digest in digests.items() if digest in kept}


def found(wanted: list[Target]) -> dict[Target, MachineCode]:
    """Return stored results, and new results of changed kernels."""
    codes = recorded(wanted)
    if changed := [target for target in wanted if target not in codes]:
        with compilers(compiling=read) as read_all:
            codes |= dict(zip(changed, read_all(changed), strict=True))
    return {target: codes[target] for target in wanted}


def name_of(launch: Launch) -> str:
    """Return kernel and head dim, as in tables."""
    name = f"{launch.kernel.removeprefix('attention_')} {launch.head_dim}"
    return name + " unordered" * launch.unordered + f" pass {launch.key_pass + 1}" * (
        launch.key_pass > 0
    )


def counts(codes: Mapping[Target, MachineCode]) -> dict[str, tuple[int, int, int]]:
    """Return products of full tiles, waits for products and spilled bytes by kernel for sm_90."""
    return {
        name_of(target.launch): (
            sum(code.tiles.values()), sum(code.waits.values()), code.spills
        )
        for target, code in codes.items() if target.architecture == 90
    }


def main() -> None:
    """Print a table; with ``--record``, store it.

    With ``--counts``, print :func:`counts` and Triton's version as JSON.
    """
    if "--counts" in sys.argv[1:]:
        codes = found([target for target in targets() if target.architecture == 90])
        print(json.dumps({"triton": importlib.metadata.version("triton"), **counts(codes)}))
        return
    codes = found(targets())
    columns = ("kernel", "sm", "registers", "shared", "spilled", "tiles' products",
               "instructions", "loads", "waits")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for target, code in codes.items():
        columns_of = (
            ", ".join(f"{count} {name}" for name, count in each.items()) or "-"
            for each in (code.tiles, code.products, code.loads, code.waits)
        )
        sizes = (code.registers, code.shared, code.spills)
        cells = (name_of(target.launch), target.architecture, *sizes, *columns_of)
        print(f"| {' | '.join(map(str, cells))} |")
    if "--record" in sys.argv[1:]:
        sources = kernel_sources()
        rows = [{"digest": key(t, sources), "target": [str(t.launch), t.architecture],
                 "code": asdict(code)} for t, code in codes.items()]  # fmt: skip
        RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
