"""Scan of the sizes of all samples of a dataset, for balanced batches.

Text is tokenized; only the headers of images and sounds are read. With ``data.processor``, the
processor runs once for every sample, because only the processor knows how many tokens an item
becomes. Worker processes scan in parallel; results are cached (``raymm.data.sampling.scan_cache``).
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from raymm.data.conversations.text import TextEncoder
from raymm.data.readers import Dataset
from raymm.data.samples.config import DataConfig
from raymm.data.samples.headers import AUDIO, IMAGE, VIDEO, Header, check_media
from raymm.data.samples.media import media_name
from raymm.data.samples.sample import Sample
from raymm.data.sampling.scan_cache import load_scan, save_scan, scan_key
from raymm.data.sampling.scan_result import SampleScan
from raymm.data.video.frames import FrameSampling
from raymm.errors import FailureKind, SampleError

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
