"""Claim: the memory of a data worker does not grow over a stream, from files or from S3.

Run with `python -m benchmarks.data_memory --json`.

Tar shards of pictures and texts are written, then read once from the local disk and once by URL
from a loopback S3 server (moto, in a separate process), by `StepLoader` with one worker, which
decodes, tokenizes and collates all of them. At regular intervals the worker's private memory is
read from `/proc/PID/status`: resident pages without those shared with Ray's object store (`RssAnon
+ RssFile`). `growth_mib` is its median over the last quarter of the run less that over the second
quarter; the first includes imports and caches that fill.
"""

from __future__ import annotations

import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.shared import common

SHARDS = 10
SIZE = 64  # pixels per side
BATCH = 20
BUCKET = "items"
SERVER_SECONDS = 60
WORDS = [f"w{number}" for number in range(50)]


def pixels(file: Any) -> dict[str, torch.Tensor]:
    """Convert a picture to (3, SIZE, SIZE) float32, as the worker's processor."""
    from raymm.data.samples.processors import read_image

    values = torch.from_numpy(np.array(read_image(file)))
    return {"pixel_values": values.permute(2, 0, 1).float() / 255}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of fifty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<unk>", *WORDS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_shards(folder: Path, items: int) -> int:
    """Write tar shards of incompressible noise pictures and return their size in bytes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for number in range(shard, items, SHARDS):
                picture = io.BytesIO()
                noise = generator.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
                Image.fromarray(noise).save(picture, "png")
                text = " ".join(generator.choice(WORDS, 12))
                for suffix, content in (("png", picture.getvalue()), ("txt", text.encode())):
                    member = tarfile.TarInfo(f"{number:07}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return sum(file.stat().st_size for file in folder.iterdir())


def start_server(folder: Path) -> tuple[subprocess.Popen, str]:
    """Start an S3 server with the shards and return it with their URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    from pyarrow.fs import S3FileSystem

    deadline = time.monotonic() + SERVER_SECONDS
    client = S3FileSystem(
        endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
    )
    while True:
        try:
            client.create_dir(BUCKET)
            break
        except OSError:
            if time.monotonic() > deadline or server.poll() is not None:
                server.terminate()
                raise
            time.sleep(0.2)
    for file in sorted(folder.iterdir()):
        with client.open_output_stream(f"{BUCKET}/shards/{file.name}") as target:
            target.write(file.read_bytes())
    return server, f"s3://{BUCKET}/shards?endpoint_override=127.0.0.1:{port}&scheme=http"


def resident_mib(pid: int) -> float:
    """Return a process's private resident memory in MiB."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def measure(path: str, tokenizer: Path, items: int, every: int) -> dict[str, Any]:
    """Measure a worker's memory over one pass of a source."""
    import ray

    from raymm.data import DataConfig, StepLoader

    config = DataConfig(
        train={"path": path, "format": "tar"}, tokenizer=str(tokenizer),
        modalities={"vision": {"column": "png", "processor": "benchmarks.data_memory:pixels"}},
        batch_size=BATCH, microbatches=2,
    )
    memory, done, pid = [], 0, 0
    start = time.perf_counter()
    with StepLoader(config, steps=items // BATCH) as loader:
        for step in loader:
            pid = pid or ray.get(step.owner.pid.remote())  # type: ignore[attr-defined]
            done += sum(meta.num_samples for meta in step.meta)
            if done % every == 0:
                memory.append(round(resident_mib(pid), 1))
            del step
    seconds = time.perf_counter() - start
    quarter = max(len(memory) // 4, 1)
    growth = statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])
    return {
        "items": done, "resident_mib": memory, "most_mib": max(memory),
        "growth_mib": round(growth, 1), "items_per_s": round(done / seconds, 1),
    }


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--items", type=int, default=10_000, help="items of the stream")
    options.add_argument("--every", type=int, default=500, help="items between two measurements")
    args = options.parse_args()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    os.environ.update(keys, AWS_EC2_METADATA_DISABLED="true")
    with tempfile.TemporaryDirectory(prefix="raymm-memory-") as name:
        folder = Path(name)
        write_tokenizer(folder / "tokenizer")
        size = write_shards(folder / "shards", args.items)
        server, url = start_server(folder / "shards")
        try:
            with common.local_ray(num_cpus=2, environment=keys):
                found = {
                    where: measure(path, folder / "tokenizer", args.items, args.every)
                    for where, path in (("local", str(folder / "shards")), ("s3", url))
                }
        finally:
            server.terminate()
            server.wait(SERVER_SECONDS)
    looks = f"MiB after every {args.every}"
    table = Table("source", "items/s", "most MiB", "growth MiB", looks)
    for where, values in found.items():
        table.add_row(
            where, str(values["items_per_s"]), str(values["most_mib"]), str(values["growth_mib"]),
            json.dumps(values["resident_mib"]),
        )
    common.console().print(table)
    common.emit(
        {"machine": common.machine(), "source_mib": round(size / 2**20, 1), **found}, args.json
    )


if __name__ == "__main__":
    main()
