"""What a rank does to keep features of a frozen encoder: every item by itself, so that an item's
features do not follow from who shares its microbatch, and written behind the steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from raymm.actors.features.feature_folder import FeatureFolder, Features
from raymm.errors import InputError

FEATURES = "raymm_features"
"""What a modality's items have in place of the encoder's inputs, where their features are known:
(items, tokens, width). Of frozen first blocks, names that begin with it have what comes beside
their hidden state."""
KEYS = "raymm_feature_keys"
"""Under which the features of a microbatch's items are kept; "" for those that are not."""
# Items that wait to be written; a rank that is this far ahead of its disk keeps no more of them.
MOST_WAITING = 256


class FeatureWriter:
    """Writes features while steps go on, as long as there is room.

    Args:
        folder: where to.
    """

    def __init__(self, folder: FeatureFolder) -> None:
        self._folder = folder
        self._left = folder.room - folder.bytes()
        self._waiting: queue.Queue[tuple[str, Features]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def keep(self, keys: Sequence[str], features: Mapping[str, torch.Tensor]) -> None:
        """Keep the features of items.

        Args:
            keys: of the items; what has none, or is there already, is left out.
            features: (items, ...) each, on any device.

        Raises:
            InputError: they do not have a row per item, so whose each is nobody knows.
        """
        for name, tensor in features.items():
            if len(tensor) != len(keys):
                raise InputError(
                    f"cache is set, but an encoder returns {len(tensor)} rows of {name} for "
                    f"{len(keys)} items; accepted: one row per item, or no cache"
                )
        on_host = {name: tensor.detach().cpu() for name, tensor in features.items()}
        for item, key in enumerate(keys):
            own = {name: tensor[item] for name, tensor in on_host.items()}
            size = self._folder.size(key, own)
            if not key or size > self._left or self._folder.has(key):
                continue
            try:
                self._waiting.put_nowait(
                    (key, {name: tensor.clone() for name, tensor in own.items()})
                )
            except queue.Full:
                return
            self._left -= size

    def wait(self) -> None:
        """Until all that was kept is written."""
        self._waiting.join()

    def _write(self) -> None:
        while True:
            key, features = self._waiting.get()
            try:
                self._folder.write(key, features)
            except OSError:  # a full disk: they are computed every time
                self._left = 0
            finally:
                self._waiting.task_done()


def every_item(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The inputs of an encoder, item by item.

    Kernels round differently for one item and for several, so what was computed together could
    not be used in another company.

    Args:
        inputs: of all, tensors with items along their first dimension; the rest is every item's.
    """
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    count = len(next(iter(tensors.values())))
    for i in range(count):
        yield {**inputs, **{name: value[i : i + 1] for name, value in tensors.items()}}
