"""Scan of the sizes of all samples of a dataset, for balanced batches.

Text is tokenized; only the headers of images and sounds are read. With ``data.processor``, the
processor runs once for every sample, because only the processor knows how many tokens an item
becomes. Worker processes scan in parallel. Results are cached on disk, in one ``.npz`` file without
pickles per dataset, tokenizer and configuration.
"""

import hashlib
import inspect
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from raymm.data.conversations.text import TextEncoder, processor_folder
from raymm.data.readers import Dataset, Mixture, Repeated
from raymm.data.readers.files import cache_folder, written_file
from raymm.data.remote.path import size_of, version_of
from raymm.data.samples.config import DataConfig
from raymm.data.samples.headers import AUDIO, IMAGE, VIDEO, Header, check_media
from raymm.data.samples.media import Sample, media_name
from raymm.data.video.frames import FrameSampling
from raymm.errors import FailureKind, SampleError
from raymm.packages import import_object, is_import_path
from raymm.scheduler.minibatch.problem import SampleSizes

Units = Callable[[np.ndarray], np.ndarray]  # from (M, 3) items to (M,) whole units
_VERSION = 3
# Includes Python code that a folder contains for its processor or tokenizer.
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".vocab", ".bpe", ".py")
# Libraries whose version affects token counts: tokenizers, and decoding and resizing of items.
_LIBRARIES = ("transformers", "tokenizers", "pillow")
_LENGTHS, _HEADERS = "counts/", "items/"
# Samples per task of a worker process, and the granularity of progress.
_CHUNK = 256
# Samples that justify one more worker process, which takes seconds to start.
_SAMPLES_PER_WORKER = 10_000
_MAX_WORKERS = 16

Progress = Callable[[int, int], None]  # (samples done, samples in all)
# Tokens of the text of a sample, and three numbers per item by modality (``SampleScan.items``).
Sizes = tuple[int, dict[str, list[tuple[int, int, int]]]]
# Factory that takes a dataset and its configuration and returns a function from sample to sizes.
Measure = Callable[[Dataset, DataConfig], Callable[[Sample], Sizes]]


@dataclass(frozen=True, eq=False)
class SampleScan:
    """Sizes of N samples, with the M items of each modality in the order of their samples.

    Attributes:
        text_tokens: (N,) int64, at most ``max_length``; 0 for unusable samples.
        counts: number of items per sample by modality, (N,) int64; 0 for unusable samples.
        items: sizes of items by modality, (M, 3) int64: (width, height, frames) of an image, with 1
            frame unless the item is a list of frames; (frames, Hz, channels) of a sound; (values
            passed to the tower, 1, 1) for the processor of a Hugging Face VLM; zeros otherwise.
        sources: (N,) int64, index into ``source_names``.
        unusable: (K,) int64, indices of unusable samples, ascending.
        reasons: error messages of the K unusable samples.
    """

    text_tokens: np.ndarray
    counts: dict[str, np.ndarray]
    items: dict[str, np.ndarray]
    sources: np.ndarray
    source_names: tuple[str, ...]
    unusable: np.ndarray
    reasons: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.text_tokens)

    def seconds(self, modality: str) -> np.ndarray:
        """Return the length of every sound of a modality in seconds, (M,) float64."""
        frames, rate = self.items[modality][:, 0], self.items[modality][:, 1]
        return frames / np.maximum(rate, 1)

    def sizes(self, units: Mapping[str, Units] | None = None) -> SampleSizes:
        """Return the sizes for planning mini-batches: a column per modality, then ``"text"`` in
        tokens.

        Args:
            units: by modality, a function from (M, 3) ``items`` to (M,) whole units, for example
                the tiles of an image. By default, every item is one unit.
        """
        columns = []
        for name, counts in self.counts.items():
            function = (units or {}).get(name)
            items = self.items[name]
            item_sizes = np.ones(len(items), np.int64) if function is None else function(items)
            owner = np.repeat(np.arange(len(self)), counts)
            sums = np.zeros(len(self), np.int64)
            np.add.at(sums, owner, np.asarray(item_sizes, np.int64))
            columns.append(sums)
        values = np.stack([*columns, self.text_tokens], axis=1)
        return SampleSizes((*self.counts, "text"), values, self.sources, ("text",))


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


def scan(
    dataset: Dataset,
    config: DataConfig,
    workers: int | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    measure: Measure | None = None,
) -> SampleScan:
    """Measure the size of every sample. Raise a ``SampleError`` for the first unusable sample,
    unless ``on_error`` is ``"skip"``, and a ``DataError`` if the tokenizer is missing, or a reader
    fails.

    Args:
        workers: number of processes; by default one per CPU, and at most one per 10,000 samples. 1
            scans in this process. A script that starts more must guard its top-level code with ``if
            __name__ == "__main__":``, as always with multiprocessing.
        cache: folder for results; None disables the cache. A cached result is used if files,
            columns, tokenizer and configuration are unchanged; media files replaced under the same
            name are not detected.
        progress: called in this process with (samples done, total samples).
        measure: factory of the function that measures a sample, by default :class:`HeaderSizes`;
            must be importable by worker processes. Results of functions from outside raymm are not
            cached, because edits of such a function would go unnoticed.
    """
    name = "" if measure is None else getattr(measure, "__qualname__", repr(measure))
    if measure is not None and not getattr(measure, "__module__", "").startswith("raymm."):
        cache = None
    measure = measure or HeaderSizes
    key = scan_key(dataset, config, name) if cache is not None else None
    if cache is not None and key is not None and (
        stored := load_scan(cache, key, dataset, config)
    ) is not None:
        if progress is not None:
            progress(len(dataset), len(dataset))
        return stored
    result = _joined(dataset, config, list(_parts(dataset, config, workers, progress, measure)))
    if cache is not None and key is not None:
        save_scan(cache, key, result)
    return result


@dataclass(frozen=True)
class _Part:
    tokens: list[int]
    counts: dict[str, list[int]]
    items: dict[str, list[tuple[int, int, int]]]
    unusable: list[tuple[int, SampleError]]


class _Scanner:
    def __init__(self, dataset: Dataset, config: DataConfig, measure: Measure):
        self.dataset, self.config = dataset, config
        self._sizes = measure(dataset, config)

    def scan(self, start: int, stop: int) -> _Part:
        names = list(self.config.modalities)
        chunk = _Part([], {name: [] for name in names}, {name: [] for name in names}, [])
        for index in range(start, stop):
            try:
                tokens, items = self._sizes(self.dataset[index])
            except SampleError as error:
                from raymm.actors.faults.failure_kind import failure_kind  # imports torch

                if failure_kind(error) is FailureKind.RESOURCE:
                    raise  # the process lacks a resource; the sample is not at fault
                error.__cause__ = error.__context__ = None  # may not be picklable
                chunk.unusable.append((index, error))
                tokens, items = 0, {name: [] for name in names}
                if self.config.on_error == "raise":
                    return chunk
            chunk.tokens.append(tokens)
            for name in names:
                chunk.counts[name].append(len(items[name]))
                chunk.items[name].extend(items[name])
        return chunk


class HeaderSizes:
    """Measures samples by their text and the headers of their items."""

    def __init__(self, _: Dataset, config: DataConfig):
        self.config = config
        self.text = TextEncoder.from_config(config)

    def __call__(self, sample: Sample) -> Sizes:
        tokens = len(self.text.encode(sample)[0])
        return tokens, {name: self._items(name, sample) for name in self.config.modalities}

    def _items(self, name: str, sample: Sample) -> list[tuple[int, int, int]]:
        items, sampling = [], self.config.sampling(name)
        for item in sample.media.get(name, ()):
            frames = item if isinstance(item, tuple) else (item,)
            try:
                headers = [
                    check_media(frame, self.config.limits, sampling is not None) for frame in frames
                ]
            except SampleError as error:
                column = sample.columns[name]
                raise SampleError(
                    error.reason, column, media_name(item), sample.id, sample.place or None
                ) from None
            items.append(_numbers(headers, sampling))
        return items


def _numbers(headers: list[Header], sampling: FrameSampling | None) -> tuple[int, int, int]:
    first = headers[0]
    if first.kind == VIDEO and sampling is not None:
        width, height = sampling.size(first.width, first.height)
        return width, height, len(sampling.times(first.seconds))
    if first.kind == IMAGE:
        return first.width, first.height, len(headers)
    return (first.frames, first.rate, first.channels) if first.kind == AUDIO else (0, 0, 0)


def _parts(
    dataset: Dataset, config: DataConfig, workers: int | None, progress: Progress | None,
    measure: Measure,
) -> Iterator[_Part]:  # fmt: skip
    total, scanned = len(dataset), 0
    ranges = [(start, min(start + _CHUNK, total)) for start in range(0, total, _CHUNK)]
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), total // _SAMPLES_PER_WORKER, _MAX_WORKERS)
    run = _in_this_process if workers <= 1 else _in_workers
    chunks = run(dataset, config, ranges, workers, measure)
    for (start, stop), chunk in zip(ranges, chunks, strict=True):
        if chunk.unusable and config.on_error == "raise":
            raise chunk.unusable[0][1]
        scanned += stop - start
        if progress is not None:
            progress(scanned, total)
        yield chunk


def _in_this_process(dataset, config, ranges, _workers, measure) -> Iterator[_Part]:
    scanner = _Scanner(dataset, config, measure)
    for start, stop in ranges:
        yield scanner.scan(start, stop)


def _in_workers(dataset, config, ranges, workers, measure) -> Iterator[_Part]:
    # Spawn, not fork: this process may have threads (Ray, torch), and a fork would copy held locks.
    pool = ProcessPoolExecutor(
        min(workers, len(ranges)), get_context("spawn"), _start_worker, (dataset, config, measure)
    )
    try:
        yield from pool.map(_scan_range, ranges)
    finally:
        pool.shutdown(cancel_futures=True)


_scanner: _Scanner | None = None  # of a worker process


def _start_worker(dataset: Dataset, config: DataConfig, measure: Measure) -> None:
    global _scanner
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _scanner = _Scanner(dataset, config, measure)


def _scan_range(bounds: tuple[int, int]) -> _Part:
    assert _scanner is not None  # see _start_worker
    return _scanner.scan(*bounds)


def _joined(dataset: Dataset, config: DataConfig, parts: list[_Part]) -> SampleScan:
    def joined(lists: list[list], width: int | None = None) -> np.ndarray:
        flat = np.asarray([value for numbers in lists for value in numbers], dtype=np.int64)
        return flat.reshape(-1, width) if width else flat

    unusable = [pair for chunk in parts for pair in chunk.unusable]
    return SampleScan(
        joined([chunk.tokens for chunk in parts]),
        {name: joined([chunk.counts[name] for chunk in parts]) for name in config.modalities},
        {name: joined([chunk.items[name] for chunk in parts], 3) for name in config.modalities},
        np.asarray(dataset.sources, np.int64),
        tuple(dataset.names),
        np.asarray([index for index, _ in unusable], np.int64),
        tuple(str(error) for _, error in unusable),
    )
