"""Uses of optional packages. Prints each error as JSON: ``[class, message]``.

    python tests/install/uses.py FOLDER

The folder has a tiny model of every kind in ``KIND/model``.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.vlm.kinds import KINDS
from raymm.actors.storage.location import check_location
from raymm.callbacks.handler import named_callbacks
from raymm.data import DataConfig, check_data
from raymm.data.conversations.processor import ModelProcessor

TEXT = {"tokenizer": "none", "batch_size": 1, "microbatches": 1}


def main() -> None:
    models = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        raised = {name: outcome(use) for name, use in uses(models, Path(folder)).items()}
    print(json.dumps(raised))


def outcome(use: Callable[[], Any]) -> list[str] | None:
    try:
        use()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def uses(models: Path, folder: Path) -> dict[str, Callable[[], Any]]:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"id": "a", "text": "x", "clip": "a.mp4"}) + "\n")
    (folder / "rows.parquet").write_bytes(b"PAR1")
    (folder / "rows.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    saved = folder / "saved"
    saved.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (saved / name).write_text("{}")

    def data(train: Any, **more: Any) -> Callable[[], None]:
        return lambda: check_data(DataConfig(train=str(train), **TEXT, **more))

    clips = {"video": {"column": "clip", "processor": "json:loads", "video": {"fps": 1}}}
    return {
        "a Parquet file": data(folder / "rows.parquet"),
        "a compressed file": data(folder / "rows.jsonl.zst"),
        "a folder of datasets": data(saved),
        "a data set of the hub": data("hf://datasets/some-org/pictures"),
        "a data file in a bucket": data("s3://bucket/rows.jsonl"),
        "a run in a bucket": lambda: check_location("s3://bucket/run"),
        "video files": data(rows, modalities=clips),
        **{
            name: lambda name=name: named_callbacks([name])
            for name in ("tensorboard", "wandb", "mlflow")
        },
        **{
            kind: lambda kind=kind: ModelProcessor(str(models / kind / "model")) for kind in KINDS
        },
    }


if __name__ == "__main__":
    main()
