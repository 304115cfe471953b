"""Opening of the sources of a split as one dataset."""

import numpy as np

from raymm.data.readers import Dataset, Mixture, Reader, ReaderOptions, Repeated, open_source
from raymm.data.samples.config import DataConfig, SourceConfig
from raymm.data.samples.placeholders import part_types
from raymm.data.samples.row_forms import ACCEPTED
from raymm.data.samples.rows import TEXT_ROLES
from raymm.errors import DataError
from raymm.packages import is_import_path, user_function


def open_split(config: DataConfig, split: str) -> Dataset:
    """Open the dataset of ``"train"`` or ``"heldout"``; raise a ``DataError`` if it is not set or
    cannot be read."""
    if split not in ("train", "heldout"):
        raise DataError(f"split must be 'train' or 'heldout', got {split!r}")
    sources = config.sources(split)
    if not sources:
        raise DataError(f"data.{split} is not set")
    readers = [_open(config, source, split) for source in sources]
    return readers[0] if len(readers) == 1 else Mixture(readers)


def _open(config: DataConfig, source: SourceConfig, split: str) -> Reader | Repeated:
    reader = open_source(source.path, source.format, _options(config, source))
    rows = None
    if config.heldout_fraction is not None:
        is_heldout = _heldout_rows(len(reader), config.heldout_fraction, config.seed)
        rows = np.flatnonzero(is_heldout == (split == "heldout"))
        if not len(rows):
            raise DataError(
                f"data.heldout_fraction is {config.heldout_fraction:g}, and {source.path!r} has "
                f"{len(reader)} row; accepted: at least 2 rows, or no heldout_fraction"
            )
    elif source.repeat == 1:
        return reader
    return Repeated(reader, source.repeat, config.seed, rows)


def _heldout_rows(rows: int, fraction: float, seed: int) -> np.ndarray:
    """Return a (rows,) bool mask of held-out rows: a random fraction, at least one row but not all.
    """
    chosen = np.zeros(rows, bool)
    count = min(max(1, round(fraction * rows)), rows - 1)
    chosen[np.random.default_rng(seed).permutation(rows)[:count]] = True
    return chosen


def _options(config: DataConfig, source: SourceConfig) -> ReaderOptions:
    form = source.row_form or config.row_form
    if is_import_path(form):
        user_function("data.row_form", form, ACCEPTED)
    columns = {
        name: source.columns.get(name, modality.column)
        for name, modality in config.modalities.items()
    }
    ignored = {*config.ignore_columns, *source.ignore_columns}
    # A source configured without a modality may still have its column.
    ignored |= {name for n, name in config.columns.items() if columns[n] is None}
    return ReaderOptions(
        name=source.name or "",
        columns={name: column for name, column in columns.items() if column is not None},
        parts=part_types(config.modalities),
        text_columns={r: name for r in TEXT_ROLES if (name := source.columns.get(r)) is not None},
        row_form=form,
        ignore_columns=frozenset(ignored),
        frames=frozenset(name for name, modality in config.modalities.items() if modality.frames),
        media_folders=tuple(config.media_folders),
        subset=source.subset,
        split=source.split,
        revision=source.revision,
        skip=config.on_error == "skip",
        limits=config.limits,
    )
