"""Options of readers."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.data.samples.rows import RowRules


@dataclass(frozen=True)
class ReaderOptions(RowRules):
    """Options of a reader.

    Attributes:
        media_folders: folders in which rows may name files, in addition to the folder of the
            source.
        subset, split, revision: of a hub dataset
            (:class:`raymm.data.readers.datasets_folder.HubDataset`).
        skip: keep unusable rows, and raise only when they are read.
        survey: read all rows while opening, and detect media in the usual columns
            (:mod:`raymm.data.readers.detect`).
    """

    name: str = ""
    media_folders: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    skip: bool = False
    survey: bool = False
