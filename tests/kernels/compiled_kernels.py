"""Compilation of the Triton kernels for sm_90 without a GPU, with the reports of ptxas.

Runs in separate processes (spawned by test_compile_gate): kernels compile only if Triton was not
imported to interpret. Compiling all takes minutes, so results are stored in
``compiled_kernels.json``, each launch with a digest of its inputs.

    python tests/kernels/compiled_kernels.py            # prints a table; --every: more head dims
    python tests/kernels/compiled_kernels.py --record   # writes the file
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "flash" / "gpu"
COMPILED = ("backward", "forward", "ops")
TARGET = ("cuda", 90, 32)
# Head dims of decoders and encoders in use; those between powers of two are padded to the next and
# need a column test. fp16 compiles to the same code as bf16 except for types.
HEAD_DIMS = {
    "bfloat16": (32, 64, 80, 128, 192, 256, 512),
    "float16": (128,),
    "float32": (32, 80, 128, 256, 512),
}
# Variants without identity bits in masks are a subset of those with them.
WITHOUT_BITS = {"bfloat16": (128,), "float16": (), "float32": ()}
EVERY_HEAD_DIM = (32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_TENSORS = {
    "query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value",
}  # fmt: skip
_TILES = {"query", "key", "value", "grad_out"}
"""Tensors that a kernel may load by descriptors."""
_FP32_TENSORS = {
    "lse", "stats", "sums", "part_out", "part_lse", "part_grad", "part_key", "part_value",
}  # fmt: skip
_INT_TENSORS = {"bounds", "attend", "identity", "items", "runs", "merges"}
_FLOATS = {"inner", "multiplier", "scale", "factor"}


@dataclass(frozen=True)
class Launch:
    """Compiled kernel that some call of `triton_attention` launches."""

    kernel: str
    dtype: str
    head_dim: int
    bits: bool = False
    softcap: bool = False
    key_pass: int = 0
    descriptors: bool = False
    unordered: bool = False

    def __str__(self) -> str:
        flags = "-bits" * self.bits + "-softcap" * self.softcap + f"-{self.key_pass}"
        flags += "-descriptors" * self.descriptors + "-unordered" * self.unordered
        return f"{self.kernel}-{self.dtype}-{self.head_dim}{flags}"


@dataclass(frozen=True)
class Report:
    """Report of ptxas.

    Attributes:
        spills: bytes of spill stores and loads.
        shared: bytes of shared memory of the launch.
        tensor_cores: wgmma or mma instructions in the PTX.
    """

    launch: Launch
    registers: int
    spills: int
    shared: int
    tensor_cores: int


def launches(dtype: str, head_dims: tuple[int, ...] | None = None) -> list[Launch]:
    """Return every launch of a dtype for some head dims; by default :data:`HEAD_DIMS`.

    A compilation takes 2 s or more.
    """
    import torch

    from raymm.kernels.flash.gpu.launch_configs import attention_config

    found = []
    for head_dim in HEAD_DIMS[dtype] if head_dims is None else head_dims:
        without = head_dims is not None or head_dim in WITHOUT_BITS[dtype]
        small = ("merge_forward", "merge_backward", "row_statistics")
        found += [Launch(kernel, dtype, head_dim) for kernel in small]
        for softcap, wanted in itertools.product((False, True), (False, True)):
            config = attention_config(
                head_dim, getattr(torch, dtype), softcap=softcap, descriptors=wanted
            )
            if wanted and not config.forward.descriptors:
                continue
            for bits in (False, True) if without else (True,):
                make = partial(
                    Launch, dtype=dtype, head_dim=head_dim, bits=bits, softcap=softcap,
                    descriptors=wanted,
                )  # fmt: skip
                found += [make("attention_forward"), make("attention_backward_query")]
                passes = range(1 + config.backward_key.two_passes)
                found += [make("attention_backward_key", key_pass=number) for number in passes]
                if wanted and attention_config(
                    head_dim, getattr(torch, dtype), softcap=softcap, descriptors=True,
                    unordered=True,
                ).backward_key.unordered:  # fmt: skip
                    found.append(make("attention_backward_key", unordered=True))
    return found


def kernel_sources() -> dict[str, str]:
    """Return, for each kernel, the functions and constants that it calls and reads.

    Launching code, comments and docstrings are excluded.
    """
    files: dict[str, dict[str, ast.stmt]] = {}
    for name in COMPILED:
        found = files[name] = {}
        for node in ast.parse((KERNELS / f"{name}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                if ast.get_docstring(node) is not None:
                    del node.body[0]
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {
                    each.id: node for each in ast.walk(node)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                }

    def reached(file: str, name: str, seen: dict[tuple[str, str], str]) -> None:
        place = next((f for f in (file, "ops") if name in files[f]), None)
        if place is None or (place, name) in seen:
            return
        node = files[place][name]
        seen[place, name] = ast.dump(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                reached(place, each.id, seen)

    sources = {}
    for file, nodes in files.items():
        for name in nodes:
            seen: dict[tuple[str, str], str] = {}
            reached(file, name, seen)
            sources[name] = "\n".join(seen[key] for key in sorted(seen))
    return sources


def digest(
    launch: Launch, sources: Mapping[str, str], target: tuple[str, int, int] = TARGET
) -> str:
    """Return the digest of the kernel, its arguments in this launch, and Triton."""
    function, constants, options = _arguments(launch)
    types = {name: _type(name, launch, constants) for name in function.arg_names}
    text = repr((importlib.metadata.version("triton"), target, sources[launch.kernel], types))
    text += json.dumps([constants, options], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(wanted: list[Launch]) -> dict[Launch, Report]:
    """Return stored reports whose kernels, arguments and compiler are unchanged."""
    rows = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    reports = {Launch(**row["launch"]): row for row in rows}
    sources = kernel_sources()
    return {
        launch: Report(**{**reports[launch]["report"], "launch": launch})
        for launch in wanted
        if launch in reports and reports[launch]["digest"] == digest(launch, sources)
    }


def record(reports: list[Report]) -> None:
    """Store the reports."""
    sources = kernel_sources()
    rows = []
    for report in reports:
        values = asdict(report)
        launch = values.pop("launch")
        rows.append({"digest": digest(report.launch, sources), "launch": launch, "report": values})
    RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")


@contextlib.contextmanager
def compilers(
    processes: int = 2, compiling: Callable[..., Any] | None = None
) -> Iterator[Callable[..., list[Any]]]:
    """Start processes that compile with an empty cache, as ptxas reports only when it runs.

    Args:
        processes: number of processes.
        compiling: their function; :func:`compile_launch` by default.
    """
    work = compiling or compile_launch
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(
            processes, mp_context=context, initializer=_start, initargs=(cache,)
        ) as pool,
    ):
        yield lambda wanted, **other: list(pool.map(partial(work, **other), wanted))


def _start(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


def compile_launch(launch: Launch, **other: int) -> Report:
    """Compile for sm_90 like the launch, with pointers aligned to 16 bytes.

    ``other`` compiler options or compile-time arguments replace the table's.
    """
    compiled, registers, spills = compile_for(launch, TARGET, **other)
    ptx = compiled.asm["ptx"]
    return Report(
        launch, registers, spills, compiled.metadata.shared,
        len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", ptx)),
    )  # fmt: skip


def compile_for(
    launch: Launch, target: tuple[str, int, int], **other: int
) -> tuple[Any, int, int]:
    """Compile a launch for a target; return the kernel, registers per thread, bytes spilled."""
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
            target=GPUTarget(*target),
            options=options,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas printed no statistics for {launch}: {log.getvalue()!r}")
    return compiled, int(registers[1]), int(spills[1]) + int(spills[2])


def _arguments(launch: Launch) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, compile-time arguments and compiler options from the launch tables."""
    import torch

    from raymm.kernels.flash.gpu import backward as triton_backward
    from raymm.kernels.flash.gpu import forward as triton_forward
    from raymm.kernels.flash.gpu import launch_configs as configs

    module = triton_forward if hasattr(triton_forward, launch.kernel) else triton_backward
    function = getattr(module, launch.kernel)
    config = configs.attention_config(
        launch.head_dim, getattr(torch, launch.dtype), softcap=launch.softcap,
        descriptors=launch.descriptors, unordered=launch.unordered,
    )  # fmt: skip
    padded = configs.padded_head_dim(launch.head_dim)
    small = {"D": launch.head_dim, "BLOCK_D": padded}
    if launch.kernel == "row_statistics":
        rows = configs.statistics_rows(launch.head_dim)
        return function, {**small, "ROWS": rows}, dict(configs.SMALL_OPTIONS)
    if launch.kernel.startswith("merge"):
        own = config.forward if launch.kernel == "merge_forward" else config.backward_query
        constants = {**small, "M": own.block_q, "ROWS": configs.MERGE_ROWS}
        return function, constants, dict(configs.SMALL_OPTIONS)
    own = getattr(config, launch.kernel.removeprefix("attention_"))
    constants = configs.constants(own, launch.head_dim, bits=launch.bits, softcap=launch.softcap)
    if launch.kernel == "attention_backward_key":
        passes = configs.key_passes(own, with_query=launch.unordered)
        constants |= passes[launch.key_pass]
    return function, constants, configs.options(own)


def _type(name: str, launch: Launch, constants: dict[str, Any]) -> str:
    element = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[launch.dtype]
    if name in constants:
        return "constexpr"
    if name in _TILES and constants.get("TMA"):
        rows = constants["M" if name in ("query", "grad_out") else "N"]
        return f"tensordesc<{element}[1, 1, {rows}, {constants['BLOCK_D']}]>"
    if name == "sums" and constants["FOR_QUERY"]:
        return f"tensordesc<fp32[1, 1, {constants['M']}, {constants['BLOCK_D']}]>"
    if name in _TENSORS:
        return f"*{element}"
    if name in _FP32_TENSORS or name == "parts":
        return "*fp32"
    if name in _INT_TENSORS:
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"


def main() -> None:
    """Print a table of every launch.

    With ``--every``, of every relevant head dim; with ``--record``, of changed launches, which are
    stored.
    """
    every = EVERY_HEAD_DIM if "--every" in sys.argv[1:] else None
    wanted = [launch for dtype in HEAD_DIMS for launch in launches(dtype, every)]
    kept = recorded(wanted) if "--record" in sys.argv[1:] else {}
    changed = [launch for launch in wanted if launch not in kept]
    print("| kernel | registers | spilled bytes | shared bytes |\n| --- | --- | --- | --- |")
    reports: list[Report] = []
    with compilers(os.cpu_count() or 1) as compile_all:
        for start in range(0, len(changed), 16):
            for report in compile_all(changed[start : start + 16]):
                reports.append(report)
                print(
                    f"| {report.launch} | {report.registers} | {report.spills} | {report.shared} |",
                    flush=True,
                )
    if "--record" in sys.argv[1:]:
        record(sorted([*kept.values(), *reports], key=lambda report: wanted.index(report.launch)))


if __name__ == "__main__":
    main()
