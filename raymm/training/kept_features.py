"""Cached features of frozen encoders: selection, location, and the plan that uses them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from raymm.actors.features.feature_folder import FeatureFolder, make_room
from raymm.actors.weights.hub_folder import local_folder
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import FactorySource, LiveSource, ModuleSource
from raymm.config.sections import CacheSection
from raymm.data import DataConfig, default_cache
from raymm.data.loading.feature_lookup import FeatureLookup, TowerLookup
from raymm.errors import ModelError
from raymm.layout.feature_stages import (
    featured_modules,
    featured_towers,
    what_changes,
    with_feature_stages,
)
from raymm.model.modality_module import ModalityModule
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.packages import import_object
from raymm.scheduler.plan.plan import Plan
from raymm.storage.code_digest import reached_code
from raymm.storage.run_description import describe_modality, describe_module, describe_source

GIB = 2**30
_MEMORY = Path("/dev/shm")


class CodeKey(NamedTuple):
    """Settings for user code in the name of a feature folder.

    Attributes:
        version: text that the user changes with the code.
        strict: True to reject code whose changes would go unnoticed.
    """

    version: str | None = None
    strict: bool = True


@dataclass(frozen=True)
class KeptFeatures:
    """Cached encoder features of a run.

    Attributes:
        plan: plan of the run, with separate stages for projectors.
        lookup: lookup for data workers; None if nothing is cached.
        memory: folder in host memory, removed when the run ends; None if features are on disk.
    """

    plan: Plan
    folders: dict[str, FeatureFolder]
    lookup: FeatureLookup | None = None
    lines: tuple[str, ...] = ()
    memory: Path | None = None

    @classmethod
    def of(
        cls, cache: CacheSection | None, model: Model, plan: Plan,
        data: DataConfig | Sequence[Any], computed: str,
    ) -> KeptFeatures:
        """Return the cached features of a run.

        Args:
            data: data of the run. Features of batches in memory are not cached.
            computed: device and precision that compute the features.

        Raises:
            ModelError: changes of user code would go unnoticed.
        """
        if cache is None:
            return cls(plan, {})
        if not isinstance(data, DataConfig):
            return cls(plan, {}, lines=("features of batches in memory are not kept",))
        # Only features on disk outlive the code that computed them.
        code = CodeKey(cache.version, strict=cache.features == "disk")
        plan, digests, described, reasons, make_lookup = _cached(model, plan, data, computed, code)
        if hooked := sorted(digests.keys() & model.stage_hooks.keys()):
            raise ModelError(
                f"cache is given, and model.stage_hooks has hooks of {', '.join(hooked)}, which "
                "would not change cached features; accepted: one of them"
            )
        memory = _MEMORY / f"raymm-features-{os.getpid()}" if cache.features == "host" else None
        root = memory or Path(cache.folder or default_cache().parent / "features").expanduser()
        room = 0 if cache.features == "none" else int(cache.room_gib * GIB)
        paths = {name: root / f"{name}-{digest}" for name, digest in digests.items()}
        folders = {n: FeatureFolder(path, room // len(paths)) for n, path in paths.items()}
        if not paths or not room:
            return cls(plan, folders, None, tuple(reasons))
        removed = make_room(root, paths.values(), room)
        lines = [f"removed {path}: features of another encoder" for path in removed]
        lines.append(f"features of {', '.join(described)} are kept in {root}")
        return cls(plan, folders, make_lookup(folders), (*lines, *reasons), memory)

    @contextmanager
    def while_it_runs(self) -> Iterator[None]:
        """Context that removes features in host memory at its end."""
        try:
            yield
        finally:
            if self.memory is not None:
                shutil.rmtree(self.memory, ignore_errors=True)


class _Cached(NamedTuple):
    """Features of a model that can be cached.

    Attributes:
        plan: the plan, with separate stages for cached first blocks.
        digests: by module, a digest of all that determines its features.
        described: texts that name what is cached.
        reasons: why features of other modules are not cached.
        lookup: makes the lookup of data workers.
    """

    plan: Plan
    digests: dict[str, str]
    described: list[str]
    reasons: list[str]
    lookup: Callable[[dict[str, FeatureFolder]], FeatureLookup]


@singledispatch
def _cached(model: Model, plan: Plan, data: DataConfig, computed: str, code: CodeKey) -> _Cached:
    raise TypeError(f"features of models of class {type(model).__name__} are not cached")


@_cached.register
def _(
    model: PretrainedVlm, plan: Plan, data: DataConfig, computed: str, code: CodeKey
) -> _Cached:
    names, reasons = featured_towers(model, plan)
    digests = {name: _tower_digest(name, model, computed, code) for name in names}
    forms = {name: model.root_form(name) for name in names}
    return _Cached(plan, digests, names, reasons, lambda folders: TowerLookup(folders, forms))


@_cached.register
def _(
    model: MultimodalModule, plan: Plan, data: DataConfig, computed: str, code: CodeKey
) -> _Cached:
    blocks, reasons = _first_blocks(model, plan, data)
    digests = {
        name: _digest(
            name, model.encoders[name], first, data,
            f"{computed} tp {plan.module_stages(name)[0].tp}", code,
        )
        for name, first in blocks.items()
    }
    described = [
        n if first == plan.graph.node(n).num_blocks else f"{n}'s first {first} blocks"
        for n, first in blocks.items()
    ]
    return _Cached(with_feature_stages(plan, blocks), digests, described, reasons, FeatureLookup)


def _first_blocks(
    model: MultimodalModule, plan: Plan, data: DataConfig
) -> tuple[dict[str, int], list[str]]:
    """Return :func:`featured_modules` without encoders whose first blocks do not always return the
    same features for an item."""
    blocks, reasons = featured_modules(model, plan, data.modalities)
    for name in list(blocks):
        if blocks[name] == plan.graph.node(name).num_blocks:
            continue
        encoder = model.encoders[name]
        spec = model.encoder_spec(name)
        if reason := what_changes(spec, blocks[name], encoder.example_inputs):
            reasons.append(f"features of {name}'s first blocks are not kept: {reason}")
            del blocks[name]
    return blocks, reasons


def _makes(
    source: ModuleSource, skeleton: nn.Module, callables: Sequence[Any], code: CodeKey
) -> dict[str, Any]:
    """Describe what determines features but need not be equal on resume: code, and seeds of
    weights."""
    roots: list[Any] = [type(source), *dict.fromkeys(type(m) for m in skeleton.modules())]
    roots.sort(key=lambda kind: (kind.__module__, kind.__qualname__))
    if isinstance(source, FactorySource):
        roots.append(import_object(source.target))
    fields: dict[str, Any] = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": {n: str(tuple(p.shape)) for n, p in skeleton.named_parameters()},
        "code": reached_code([*roots, *callables], code.version, code.strict),
    }
    if isinstance(source, PretrainedSource) and source.missing_weights is not None:
        fields["seed"] = source.seed
    return fields


def _tower_digest(name: str, model: PretrainedVlm, computed: str, code: CodeKey) -> str:
    """Return a digest of all that determines a tower's features, except the item."""
    spec, form = model.tower_spec(name), model.root_form(name)
    skeleton = spec.source.skeleton()
    described = {
        **describe_source("tower", model.source.origin, skeleton),
        **_makes(model.source.origin, skeleton, (), code),
        "part": form.place, "kept": form.kept, "structure": str(form.tree), "dim": form.dim,
        "arguments": model.tower_inputs[name], "constants": dict(spec.constants),
        "computed": computed,
    }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _digest(
    name: str, encoder: ModalityModule, blocks: int, data: DataConfig, computed: str,
    code: CodeKey,
) -> str:
    """Return a digest of all that determines features after ``blocks`` blocks, except the item."""
    source = encoder.source()
    skeleton = source.skeleton()
    callables: list[Any] = [encoder.preprocess_callback, encoder.postprocess_module_callback]
    processor = data.modalities[name].processor
    if processor is not None and not Path(local_folder(processor, weights=False)).is_dir():
        callables.append(import_object(processor))
    described = {
        **describe_module("encoder", encoder, source, skeleton),
        **_makes(source.origin, skeleton, callables, code),
        **describe_modality("processor", data.modalities[name]),
        "blocks": blocks, "computed": computed,
    }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode())
    if isinstance(source.origin, LiveSource):
        assert encoder.module is not None  # a live source has its weights here
        for key, tensor in sorted(encoder.module.state_dict().items()):
            digest.update(key.encode())
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
