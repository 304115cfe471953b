"""Storing of a frozen encoder's features on a rank. Each item is encoded separately, so that its
features do not depend on other items of its microbatch. Files are written in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from raymm.actors.features.feature_folder import FeatureFolder, Features
from raymm.errors import InputError

FEATURES = "raymm_features"
"""Input that replaces an encoder's inputs for items with stored features: (items, tokens, width).
For frozen first blocks, names with this prefix hold the further outputs of these blocks."""
KEYS = "raymm_feature_keys"
"""Input with the keys under which a microbatch's features are stored; "" for items without
storage."""
# Largest number of items that wait to be written; further items are dropped.
MOST_WAITING = 256


class FeatureWriter:
    """Writes features to a folder in a daemon thread, up to the folder's limit in bytes."""

    def __init__(self, folder: FeatureFolder) -> None:
        self._folder = folder
        self._left = folder.room - folder.bytes()
        self._waiting: queue.Queue[tuple[str, Features]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def keep(self, keys: Sequence[str], features: Mapping[str, torch.Tensor]) -> None:
        """Store the features of items.

        Args:
            keys: keys of the items; items without a key, or with stored features, are skipped.
            features: (items, ...) each, on any device.

        Raises:
            InputError: a tensor does not have one row per item, so features cannot be assigned to
                items.
        """
        for name, tensor in features.items():
            if len(tensor) != len(keys):
                raise InputError(
                    f"cache is set, but an encoder returns {len(tensor)} rows of {name} for "
                    f"{len(keys)} items; accepted: one row per item, or no cache"
                )
        on_host = {name: tensor.detach().cpu() for name, tensor in features.items()}
        for item, key in enumerate(keys):
            item_features = {name: tensor[item] for name, tensor in on_host.items()}
            size = self._folder.size(key, item_features)
            if not key or size > self._left or self._folder.has(key):
                continue
            try:
                self._waiting.put_nowait(
                    (key, {name: tensor.clone() for name, tensor in item_features.items()})
                )
            except queue.Full:
                return
            self._left -= size

    def wait(self) -> None:
        self._waiting.join()

    def _write(self) -> None:
        while True:
            key, features = self._waiting.get()
            try:
                self._folder.write(key, features)
            except OSError:  # the disk is full: features are computed every time
                self._left = 0
            finally:
                self._waiting.task_done()


def every_item(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of an encoder for each item. Tensors have items in their first dimension;
    other values apply to every item.

    Kernels round differently for one item and for several, so features that were computed together
    would not be valid in another microbatch.
    """
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    count = len(next(iter(tensors.values())))
    for i in range(count):
        yield {**inputs, **{name: value[i : i + 1] for name, value in tensors.items()}}
