"""Compile the Triton kernels for sm_90 without a GPU, and read what ptxas says of each.

Runs in processes of its own (spawned by test_compile_gate): kernels compile only where Triton
was not imported to interpret. Compiling all takes minutes, so what came of it is kept in
``compiled_kernels.json`` with a digest of everything that it follows from.

    python tests/kernels/compiled_kernels.py            # prints a table; --every: more head dims
    python tests/kernels/compiled_kernels.py --record   # writes the file
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "flash" / "gpu"
COMPILED = ("backward", "forward", "launch_configs", "ops")
# Head dims of decoders and encoders in use; those between powers of two are padded to the next
# and differ by a column test. fp16 compiles to the same code as bf16 but for types.
HEAD_DIMS = {
    "bfloat16": (32, 64, 80, 128, 192, 256),
    "float16": (128,),
    "float32": (32, 80, 128, 256),
}
# Where masks without identity bits are compiled too: the kernels with them do all that and more.
WITHOUT_BITS = {"bfloat16": (128,), "float16": (), "float32": ()}
EVERY_HEAD_DIM = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
_TENSORS = {
    "query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value",
}  # fmt: skip
_FP32_TENSORS = {"lse", "stats", "part_out", "part_lse", "part_grad", "part_key", "part_value"}
_INT_TENSORS = {"bounds", "attend", "identity", "items", "runs", "merges"}
_FLOATS = {"inner", "multiplier", "scale", "factor"}


@dataclass(frozen=True)
class Launch:
    """One compiled kernel that some call of `triton_attention` launches."""

    kernel: str
    dtype: str
    head_dim: int
    bits: bool = False
    softcap: bool = False
    key_pass: int = 0

    def __str__(self) -> str:
        flags = "-bits" * self.bits + "-softcap" * self.softcap + f"-{self.key_pass}"
        return f"{self.kernel}-{self.dtype}-{self.head_dim}{flags}"


@dataclass(frozen=True)
class Report:
    """What ptxas said.

    Attributes:
        spills: bytes of spill stores and loads.
        shared: bytes of shared memory that the launch asks for.
        tensor_cores: wgmma or mma instructions in the PTX.
    """

    launch: Launch
    registers: int
    spills: int
    shared: int
    tensor_cores: int


def launches(dtype: str, head_dims: tuple[int, ...] | None = None) -> list[Launch]:
    """Every launch of a dtype for some head dims; by default those of :data:`HEAD_DIMS`, a
    compilation takes 2 s or more."""
    import torch

    from raymm.kernels.flash.gpu.launch_configs import attention_config

    found = []
    for head_dim in HEAD_DIMS[dtype] if head_dims is None else head_dims:
        without = head_dims is not None or head_dim in WITHOUT_BITS[dtype]
        small = ("merge_forward", "merge_backward", "row_statistics")
        found += [Launch(kernel, dtype, head_dim) for kernel in small]
        for softcap in (False, True):
            config = attention_config(head_dim, getattr(torch, dtype), softcap=softcap)
            for bits in (False, True) if without else (True,):
                same = (dtype, head_dim, bits, softcap)
                found.append(Launch("attention_forward", *same))
                found.append(Launch("attention_backward_query", *same))
                passes = range(1 + config.backward_key.two_passes)
                found += [Launch("attention_backward_key", *same, number) for number in passes]
    return found


def digest() -> str:
    """Of all that decides what comes of compiling: kernels, their tables, this file, Triton."""
    found = hashlib.sha256(importlib.metadata.version("triton").encode())
    for path in (*(KERNELS / f"{name}.py" for name in COMPILED), Path(__file__)):
        found.update(ast.dump(ast.parse(path.read_text())).encode())  # comments do not count
    return found.hexdigest()


def recorded() -> dict[str, Report]:
    """What was kept, by launch; nothing if it is of other kernels or another Triton."""
    data = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if data.get("digest") != digest():
        return {}
    reports = [Report(**{**row, "launch": Launch(**row["launch"])}) for row in data["reports"]]
    return {str(report.launch): report for report in reports}


def record(reports: list[Report]) -> None:
    """Keep what came of compiling."""
    rows = [asdict(report) for report in reports]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    RECORD.write_text(f'{{"digest": "{digest()}", "reports": [\n{lines}\n]}}\n')


@contextlib.contextmanager
def compilers(processes: int = 2) -> Iterator[Callable[..., list[Report]]]:
    """Processes that compile, with an empty cache: ptxas speaks only when it runs."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(
            processes, mp_context=context, initializer=_start, initargs=(cache,)
        ) as pool,
    ):
        yield lambda wanted, **other: list(pool.map(partial(compile_launch, **other), wanted))


def _start(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


def compile_launch(launch: Launch, **other: int) -> Report:
    """Compile for sm_90 as the launch would be, pointers aligned to 16 bytes; ``other``
    compiler options or compile-time arguments replace the table's."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants, options = _arguments(launch)
    for given in (constants, options):
        given.update({name: value for name, value in other.items() if name in given})
    types = {name: _type(name, launch, constants) for name in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if types[name].startswith("*")
    }
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            ASTSource(function, types, constants, aligned),
            target=GPUTarget("cuda", 90, 32),
            options=options,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas printed no statistics for {launch}: {log.getvalue()!r}")
    ptx = compiled.asm["ptx"]
    return Report(
        launch,
        int(registers[1]),
        int(spills[1]) + int(spills[2]),
        compiled.metadata.shared,
        len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", ptx)),
    )


def _arguments(launch: Launch) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Kernel, compile-time arguments and compiler options, from the tables that launches use."""
    import torch

    from raymm.kernels.flash.gpu import backward as triton_backward
    from raymm.kernels.flash.gpu import forward as triton_forward
    from raymm.kernels.flash.gpu import launch_configs as configs

    module = triton_forward if hasattr(triton_forward, launch.kernel) else triton_backward
    function = getattr(module, launch.kernel)
    config = configs.attention_config(
        launch.head_dim, getattr(torch, launch.dtype), softcap=launch.softcap
    )
    padded = configs.padded_head_dim(launch.head_dim)
    small = {"D": launch.head_dim, "BLOCK_D": padded}
    if launch.kernel == "row_statistics":
        return function, {**small, "ROWS": configs.STATISTICS_ROWS}, dict(configs.SMALL_OPTIONS)
    if launch.kernel.startswith("merge"):
        own = config.forward if launch.kernel == "merge_forward" else config.backward_query
        constants = {**small, "M": own.block_q, "ROWS": configs.MERGE_ROWS}
        return function, constants, dict(configs.SMALL_OPTIONS)
    own = getattr(config, launch.kernel.removeprefix("attention_"))
    constants = configs.constants(own, launch.head_dim, bits=launch.bits, softcap=launch.softcap)
    if launch.kernel == "attention_backward_key":
        constants |= configs.key_passes(own)[launch.key_pass]
    return function, constants, configs.options(own)


def _type(name: str, launch: Launch, constants: dict[str, Any]) -> str:
    tensor = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[launch.dtype]
    if name in constants:
        return "constexpr"
    if name in _TENSORS:
        return tensor
    if name in _FP32_TENSORS or name == "parts":
        return "*fp32"
    if name in _INT_TENSORS:
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"


def main() -> None:
    """Print a table of every launch; with ``--every``, of every head dim worth a mention; with
    ``--record``, keep it."""
    every = EVERY_HEAD_DIM if "--every" in sys.argv[1:] else None
    wanted = [launch for dtype in HEAD_DIMS for launch in launches(dtype, every)]
    print("| kernel | registers | spilled bytes | shared bytes |\n| --- | --- | --- | --- |")
    reports: list[Report] = []
    with compilers(os.cpu_count() or 1) as compile_all:
        for start in range(0, len(wanted), 16):
            for report in compile_all(wanted[start : start + 16]):
                reports.append(report)
                print(
                    f"| {report.launch} | {report.registers} | {report.spills} | {report.shared} |",
                    flush=True,
                )
    if "--record" in sys.argv[1:]:
        record(reports)


if __name__ == "__main__":
    main()
