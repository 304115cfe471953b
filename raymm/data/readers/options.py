"""Options of readers."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.data.samples.rows import RowRules


@dataclass(frozen=True)
class ReaderOptions(RowRules):
    """Options of a reader.

    Attributes:
        name: of the source; every sample carries it.
        media_folders: folders in which rows may name files, in addition to that of the source.
        subset, split, revision: of a data set by name
            (:class:`raymm.data.readers.hub_dataset.HubDataset`).
        skip: keep rows that cannot be used, and raise only when they are read.
        survey: read all rows while opening, and look for media in the usual columns
            (:mod:`raymm.data.readers.detect`).
    """

    name: str = ""
    media_folders: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    skip: bool = False
    survey: bool = False
