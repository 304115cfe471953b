"""Cache of scans on disk: one ``.npz`` file without pickles per dataset, tokenizer and
configuration."""

import hashlib
import inspect
import json
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from raymm.data.conversations.text import processor_folder
from raymm.data.readers import Dataset, Mixture, Repeated
from raymm.data.readers.cache import cache_folder, written_file
from raymm.data.remote.path import size_of, version_of
from raymm.data.samples.config import DataConfig
from raymm.data.sampling.scan_result import SampleScan
from raymm.packages import import_object, is_import_path

_VERSION = 3
# Includes Python code that a folder contains for its processor or tokenizer.
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".vocab", ".bpe", ".py")
# Libraries whose version affects token counts: tokenizers, and decoding and resizing of items.
_LIBRARIES = ("transformers", "tokenizers", "pillow")
_LENGTHS, _HEADERS = "counts/", "items/"


def default_cache() -> Path:
    """Return ``scans`` below ``$RAYMM_CACHE``, or below ``~/.cache/raymm``."""
    return cache_folder("scans")


def _converter(row_form: str | None) -> dict[str, Any]:
    """Return a digest of the file of a user's function that converts rows."""
    if not is_import_path(row_form):
        return {}
    file = inspect.getsourcefile(import_object(str(row_form)))
    digest = "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {"converter": digest}


def scan_key(dataset: Dataset, config: DataConfig, measure: str = "") -> str:
    """Return a hex digest of everything that a scan depends on: the path, size and modification
    time of data files, columns, contents of tokenizer and processor files, the configuration of
    text and limits, and ``measure``, the name of the function that measures samples."""
    readers = dataset.readers if isinstance(dataset, Mixture) else [dataset]
    sources = [
        {
            "reader": type(reader).__name__,
            "name": reader.name,
            "files": [[str(f), size_of(f), version_of(f)] for f in reader.files],
            "columns": reader.columns,
            "text_columns": dict(reader.options.text_columns),
            "row_form": reader.options.row_form,
        }
        | _converter(reader.options.row_form)
        | ({"rows": reader.digest} if isinstance(reader, Repeated) else {})
        for reader in readers
    ]
    fields = {
        "modalities", "max_length", "on_error", "vocabulary", "chat_template_kwargs",
        "ignore_message_keys", *vars(config.limits),
    }
    content = {
        "version": [_VERSION, *map(version, _LIBRARIES)],
        "sources": sources,
        "tokenizer": _fingerprint(config.tokenizer, "data.tokenizer"),
        "processor": config.processor and _fingerprint(config.processor, "data.processor"),
        "measure": measure,
        "config": config.model_dump(mode="json", include=fields),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: str, field: str) -> str:
    digest = hashlib.sha256()
    folder = Path(processor_folder(path, field))
    for file in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if file.is_file() and file.suffix in _TOKENIZER_SUFFIXES:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def save_scan(folder: str | Path, key: str, scan: SampleScan) -> Path:
    """Write a scan atomically and return its path; ``key`` is the result of :func:`scan_key`."""
    folder = Path(folder)
    arrays = {
        "key": np.array(key),
        "text_tokens": scan.text_tokens,
        "sources": scan.sources,
        "source_names": np.array(scan.source_names, dtype=np.str_),
        "unusable": scan.unusable,
        "reasons": np.array(scan.reasons, dtype=np.str_),
    }
    arrays |= {_LENGTHS + name: counts for name, counts in scan.counts.items()}
    arrays |= {_HEADERS + name: items for name, items in scan.items.items()}
    with written_file(_file(folder, key)) as file:
        np.savez_compressed(file, **arrays)
    return _file(folder, key)


def load_scan(
    folder: str | Path, key: str, dataset: Dataset, config: DataConfig
) -> SampleScan | None:
    """Load the scan of a key; return None if it is missing, damaged, or does not fit the dataset
    and the modalities of the configuration."""
    try:
        # Reading the arrays verifies the checksums of the zip file.
        with np.load(_file(Path(folder), key), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        scan = SampleScan(
            arrays["text_tokens"],
            {name: arrays[_LENGTHS + name] for name in config.modalities},
            {name: arrays[_HEADERS + name] for name in config.modalities},
            arrays["sources"],
            tuple(arrays["source_names"].tolist()),
            arrays["unusable"],
            tuple(arrays["reasons"].tolist()),
        )
        is_valid = arrays["key"].tolist() == key and _is_whole(scan, dataset)
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error,
            NotImplementedError, RuntimeError, MemoryError, IndexError):
        return None
    return scan if is_valid else None


def _is_whole(scan: SampleScan, dataset: Dataset) -> bool:
    """Return True if the arrays of a scan are consistent with each other and with the dataset."""
    n = len(dataset)
    arrays = [scan.text_tokens, scan.sources, scan.unusable, *scan.counts.values(),
              *scan.items.values()]
    return (
        all(array.dtype == np.int64 for array in arrays)
        and all(array.shape == (n,) for array in (scan.text_tokens, scan.sources))
        and all(array.shape == (n,) for array in scan.counts.values())
        and all(not array.size or array.min() >= 0 for array in arrays)
        and all(scan.items[k].shape == (scan.counts[k].sum(), 3) for k in scan.counts)
        and scan.source_names == tuple(dataset.names)
        and bool((scan.sources == dataset.sources).all())
        and scan.unusable.shape == (len(scan.reasons),)
        and bool((scan.unusable < n).all())
    )


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.npz"
