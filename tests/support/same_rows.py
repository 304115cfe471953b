"""The same samples in every format, for tests that compare readers."""

import io
import json
import tarfile
from pathlib import Path

from tests.support.sample_files import write_rows


def add_member(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append one file."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def hf_media(folder: Path, name: str | None, embedded: bool) -> dict | None:
    """Return the value that ``datasets`` stores for a media file."""
    if name is None:
        return None
    if embedded:
        return {"bytes": (folder / name).read_bytes(), "path": name}
    return {"bytes": None, "path": str(folder / name)}


def hf_rows(folder: Path, count: int, embedded: bool = True) -> list[dict]:
    """Write rows with media in the form of ``datasets``; all rows have all columns."""
    return [
        {
            "id": row["id"],
            "text": row.get("text"),
            "messages": row.get("messages"),
            "images": [hf_media(folder, name, embedded) for name in row["images"]],
            "audio": hf_media(folder, row["audio"], embedded),
        }
        for row in write_rows(folder, count)
    ]


def write_parquet(folder: Path, count: int, embedded: bool = True, group: int = 7) -> Path:
    """Write two Parquet files of several row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, half = hf_rows(folder, count, embedded), count // 2
    schema = pa.Table.from_pylist(rows).schema
    (folder / "parquet").mkdir()
    for name, part in (("b", rows[half:]), ("a", rows[:half])):
        table = pa.Table.from_pylist(part, schema=schema)
        pq.write_table(table, folder / "parquet" / f"{name}.parquet", row_group_size=group)
    return folder / "parquet"


def write_shards(folder: Path, count: int) -> Path:
    """Write two tar shards: text in ``json`` or ``txt``, images ``0.png`` and ``1.png``, ``wav``.
    """
    rows, half = write_rows(folder, count), count // 2
    (folder / "shards").mkdir()
    for number, part in enumerate((rows[:half], rows[half:])):
        with tarfile.open(folder / "shards" / f"{number:03}.tar", "w") as shard:
            for row in part:
                key = f"part/{row['id']}"
                if "text" in row:
                    add_member(shard, f"{key}.txt", row["text"].encode())
                described = {k: row[k] for k in ("id", "messages") if k in row}
                add_member(shard, f"{key}.json", json.dumps(described).encode())
                for n, name in enumerate(row["images"]):
                    add_member(shard, f"{key}.{n}.png", (folder / name).read_bytes())
                if row["audio"]:
                    add_member(shard, f"{key}.wav", (folder / row["audio"]).read_bytes())
    return folder / "shards"


def write_datasets_folder(folder: Path, count: int, embedded: bool = True) -> Path:
    """Write a folder of ``save_to_disk`` with ``datasets``' own types."""
    import datasets

    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features(
        id=datasets.Value("string"),
        text=datasets.Value("string"),
        messages=datasets.List(message),
        images=datasets.List(datasets.Image()),
        # Storage type of datasets.Audio(); writing with that type needs torchcodec.
        audio={"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
    )
    rows = hf_rows(folder, count, embedded)
    datasets.Dataset.from_list(rows, features=features).save_to_disk(folder / "saved")
    return folder / "saved"
