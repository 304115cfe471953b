"""Lookup of cached features of encoders and of the towers of a Hugging Face VLM, whose items need
neither decoding nor encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from raymm.actors.features.feature_folder import FeatureFolder, Features
from raymm.actors.features.root_features import RootForm
from raymm.actors.sharding.vlm.item_rows import each_item
from raymm.actors.stages.tower import featured_inputs
from raymm.data.samples.media import Media, MediaBytes, MediaRange, Sample, read_media
from raymm.errors import ModelError

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


@dataclass(frozen=True)
class TowerLookup(FeatureLookup):
    """Reader of cached tower features. The key of an item is a digest of its tower inputs."""

    forms: Mapping[str, RootForm] = field(default_factory=dict)

    def parts(
        self, parts: Mapping[str, dict[str, torch.Tensor]]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, tuple[str, ...]]]:
        """Replace the inputs of towers whose items all have cached features by these features.

        Returns:
            The inputs of each module, and the cache keys of items for the towers without cached
            features.
        """
        featured, unknown = dict(parts), {}
        for name in parts.keys() & self.forms.keys():
            keys = self.keys(name, parts[name])
            if (features := self.features(name, keys)) is None:
                unknown[name] = keys
            else:
                featured[name] = featured_inputs(name, parts[name], features)
        return featured, unknown

    def keys(self, name: str, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Return the cache keys of the items in the ``inputs`` of a tower; raise a ``ModelError``
        if the rows of the items do not add up."""
        items = each_item(name, inputs, self.forms[name].zeros_left_out)
        return tuple(map(_key, items))

    def features(self, name: str, keys: tuple[str, ...]) -> list[torch.Tensor] | None:
        """Return the cached features of all items, or None if an item has none or they do not fit
        together."""
        folder, form = self.folders[name], self.forms[name]
        items = []
        for key in keys:
            if (stored := folder.read(key)) is None or len(stored) != len(form.kept):
                return None
            items.append([stored[str(number)] for number in range(len(form.kept))])
        try:
            return form.together(items)
        except ModelError:
            return None  # the tower reports the error when it computes the features


def _key(item: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name, value in sorted(item.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
