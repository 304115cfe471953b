"""Claim: checksums cost less than 5 % of the time to save a checkpoint.

Run with `python -m benchmarks.checkpoint_checksum --json`.

A shard of `--mib` MiB of fp32 tensors is written and flushed to disk, as a rank does it
(`raymm.actors.optimizer.checkpoint_shards.write_shard`), alternating with a save without a
checksum. `checksum_share` is the relative increase in time, median over rounds: the checksum is
computed from the tensors while the disk writes the file. `in_memory_share` is the same on a file
system in memory (/dev/shm), where the checksum cannot overlap with I/O: an upper bound for any
disk. `gb_per_s` compares digests on bytes in memory; `verify_gb_per_s` is the speed of verification
before a load.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.shared import common
from raymm.actors.optimizer.checkpoint_shards import verify_shard, write_shard

DIGESTS: dict[str, Callable[[bytes], object]] = {
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
    "crc32": zlib.crc32,
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
}
TENSOR_MIB = 16
DIGEST_MIB = 64


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


def without_checksum(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Save a shard without a checksum."""
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def compare(folder: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, float]:
    """Return medians of alternating saves with and without checksums, and of verifying."""
    path = folder / "model-rank0.safetensors"
    plain, summed, verified = [], [], []
    for number in range(rounds + 1):
        path.unlink(missing_ok=True)
        first, _ = timed(without_checksum, path, tensors)
        path.unlink()
        second, written = timed(write_shard, path, tensors)
        third, _ = timed(verify_shard, path, written.file, written.names)
        if number:  # the first round warms up
            plain.append(first)
            summed.append(second)
            verified.append(third)
    size = path.stat().st_size
    path.unlink()
    ratios = [b / a for a, b in zip(plain, summed, strict=True)]
    return {
        "share": round(statistics.median(ratios) - 1, 4),
        "plain_s": round(statistics.median(plain), 3),
        "with_checksum_s": round(statistics.median(summed), 3),
        "verify_gb_per_s": round(size / statistics.median(verified) / 1e9, 2),
    }


def measure(mib: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    tensors = {
        f"llm/module.layers.{i}.weight": torch.randn(TENSOR_MIB * 2**18)
        for i in range(max(mib // TENSOR_MIB, 1))
    }
    data = os.urandom(DIGEST_MIB * 2**20)
    speeds = {
        name: round(len(data) / min(timed(digest, data)[0] for _ in range(3)) / 1e9, 2)
        for name, digest in DIGESTS.items()
    }
    with tempfile.TemporaryDirectory(dir=folder) as disk:
        on_disk = compare(Path(disk), tensors, rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        in_memory = compare(Path(memory), tensors, rounds)
    return {
        "checksum_share": on_disk["share"], "in_memory_share": in_memory["share"],
        "verify_gb_per_s": on_disk["verify_gb_per_s"], "gb_per_s": speeds,
        "disk": on_disk, "memory": in_memory,
    }


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the shard, MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    found = measure(args.mib, args.rounds, args.folder)
    table = Table("where", "plain s", "with checksum s", "share", "verify GB/s")
    for where in ("disk", "memory"):
        row = found[where]
        table.add_row(
            where, f"{row['plain_s']}", f"{row['with_checksum_s']}", f"{row['share']:+.1%}",
            f"{row['verify_gb_per_s']}",
        )
    common.console().print(table)
    common.emit({**found, "machine": common.machine()}, args.json)


if __name__ == "__main__":
    main()
