"""Lookup of cached encoder features, whose items need neither decoding nor encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.actors.features.feature_folder import FeatureFolder, Features
from raymm.data.samples.media import Media, MediaBytes, MediaRange, read_media
from raymm.data.samples.sample import Sample

_KEY_BYTES = 20


@dataclass(frozen=True)
class StepFeatures:
    """Cache keys and cached features of the items of a step.

    Attributes:
        keys: modality -> sample -> cache key of each item; ``""`` for an unreadable item.
        features: modality -> sample -> features of each item, for modalities in which all items of
            the step have cached features.
    """

    keys: Mapping[str, Mapping[int, list[str]]] = field(default_factory=dict)
    features: Mapping[str, Mapping[int, list[Features]]] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureLookup:
    """Reader of the feature cache.

    Attributes:
        folders: cache folder by modality, for one encoder with one processor in one precision.
    """

    folders: Mapping[str, FeatureFolder]

    def of_step(self, samples: Sequence[Sample]) -> StepFeatures:
        keys, features = {}, {}
        for name, folder in self.folders.items():
            keys[name] = {
                sample.index: [item_key(item) for item in sample.media[name]]
                for sample in samples if name in sample.media
            }
            if (sample_features := _read(folder, keys[name])) is not None:
                features[name] = sample_features
        return StepFeatures(keys, features)


def _read(
    folder: FeatureFolder, keys: Mapping[int, Sequence[str]]
) -> dict[int, list[Features]] | None:
    """Return the features of all items, or None if an item has none."""
    every = [key for sample_keys in keys.values() for key in sample_keys]
    if not every or not all(key and folder.has(key) for key in every):
        return None
    read: dict[int, list[Features]] = {}
    for sample, sample_keys in keys.items():
        read[sample] = []
        for key in sample_keys:
            if (features := folder.read(key)) is None:
                return None
            read[sample].append(features)
    return read


def item_key(item: Media) -> str:
    """Return the cache key of an item: a digest of its encoded bytes, independent of its name.

    The key is ``""`` if the item cannot be read; decoding it then reports the error.

    Args:
        item: a file, a part of a file, bytes, or a tuple of frames.
    """
    frames: Sequence[str | MediaBytes | MediaRange] = item if isinstance(item, tuple) else (item,)
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    try:
        for frame in frames:
            data = read_media(frame)
            digest.update(f"{len(data)} ".encode())
            digest.update(data)
    except OSError:
        return ""
    return digest.hexdigest()
