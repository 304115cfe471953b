"""Rows of a case, read and built as in a data worker after ``raymm train --data``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from raymm.data import IGNORE_INDEX, DataConfig, open_split, step_builder
from raymm.data.readers.detect import detect
from tests.support.tiny_folders import tiny

DATA = Path(__file__).parents[1] / "cases" / "data"


def case_file(name: str, folder: Path) -> Path:
    """Copy a file of a case, ``CASE/FILE``, into a folder."""
    return Path(shutil.copy(DATA / name, folder))


def with_template(kind: str, template: str, folder: Path) -> str:
    """Save the processor of a tiny model with the chat template of a case, ``CASE/FILE``."""
    processor = AutoProcessor.from_pretrained(tiny(kind)[0])
    processor.chat_template = (DATA / template).read_text()
    processor.save_pretrained(folder / "model")
    return str(folder / "model")


class BuiltRows:
    """Rows of a file for a processor.

    Args:
        file: file with the rows.
        model: folder of the processor.
        more: additional values of the section ``data``.
    """

    def __init__(self, file: Path, model: str, **more: Any) -> None:
        self.detected = detect(file)
        config = DataConfig.model_validate({
            **self.detected.data_section, "processor": model, "batch_size": 1,
            "microbatches": 1, "max_length": 4096, "shuffle": False, **more,
        })
        self.dataset = open_split(config, "train")
        self.builder: Any = step_builder(config, self.dataset)
        self.processor: Any = AutoProcessor.from_pretrained(model)

    def row(self, index: int = 0) -> dict[str, Any]:
        """Return tensors of one row in a separate microbatch."""
        return self.builder.build([[index]]).microbatches[0]

    def text(self, index: int = 0) -> str:
        """Return all tokens of a row, decoded."""
        return self.processor.tokenizer.decode(self.row(index)["input_ids"][0])

    def learned(self, index: int = 0) -> str:
        """Return the labelled tokens of a row, decoded."""
        labels = self.row(index)["labels"][0]
        return self.processor.tokenizer.decode(labels[labels != IGNORE_INDEX])
