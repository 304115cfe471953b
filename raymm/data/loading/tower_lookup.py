"""Lookup of cached features for the items of a Hugging Face VLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from raymm.actors.features.root_features import RootForm
from raymm.actors.sharding.vlm.item_rows import each_item
from raymm.actors.stages.tower import featured_inputs
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.errors import ModelError

_KEY_BYTES = 20


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
