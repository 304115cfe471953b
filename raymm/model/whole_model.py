"""A whole vision-language or audio-language model, as its folder or configuration has it.

Its own forward runs on the language model's ranks. Its towers, found by running it on an example,
are modules of their own, whose features come back where the forward calls for them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.experts.routing import Routing
from raymm.actors.features.root_features import RootForm
from raymm.actors.modules.blocks import num_blocks
from raymm.actors.modules.cut import CutInfo
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.whole.cut import (
    cut_language_model,
    in_own_depth,
    language_source,
    language_spec,
    tower_source,
    tower_spec,
)
from raymm.actors.probe.whole.kept_root import probe_root
from raymm.actors.probe.whole.towers import Tower, as_copied, check_kind, find_towers
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.whole_language import WholeLanguageSpec
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.actors.weights.model_classes import find_model_class
from raymm.actors.weights.model_part import is_within
from raymm.actors.weights.new_rows_source import NewRowsSource
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource, ModuleSource
from raymm.errors import ModelError
from raymm.model.batch_rules import LABELS
from raymm.model.modality_module import check_weights
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.model.trainable_layers import any_trainable, counted, trainable_blocks
from raymm.model.whole_batch import WholeBatchCheck
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode

FULL, FROZEN = "full", "frozen"
LANGUAGE, PROJECTOR = "language_model", "projector"
Batch = Mapping[str, torch.Tensor]
# How a part is trained: full, frozen, or by adapters.
How = str | LoraConfig


def from_pretrained(
    model: str | os.PathLike[str] | PretrainedConfig, example: Batch,
    train: Mapping[str, How] | None = None, *, seed: int = 0, trust_remote_code: bool = False,
    packing: bool = False, new_rows: range = range(0),
) -> WholeModel:  # fmt: skip
    """A whole model of a folder that ``save_pretrained`` wrote, or with random weights of a
    configuration. Nothing of its weights is read here: each rank reads its own tensors.

    Args:
        model: the folder, or the configuration, which names its architecture.
        example: inputs as its processor returns them (a batch with items of every modality that
            is trained on), by which its towers are found.
        train: by part, ``"full"``, ``"frozen"``, or adapters, under which its weights stay as they
            are (:class:`raymm.LoraConfig`): of ``"language_model"``, ``"projector"`` (what is
            between the towers and the language model), and the towers, ``"vision"``,
            ``"audio"``. Full where not said.
        seed: of random weights.
        trust_remote_code: as of :class:`raymm.ModalityModule`.
        packing: let a microbatch's rows go through the text model as one, without padding, each a
            document by itself.
        new_rows: ids of new tokens, whose rows of the embedding and the head are trained next to
            adapters of ``"language_model"``. The folder has initial values for them.

    Raises:
        ModelError: the folder lacks something.
        ProbeError: it does not run on the example, or has no towers that can be found.
        ModelError: ``train`` names what it has not.
    """
    if isinstance(model, PretrainedConfig):
        source: ModuleSource = ConfigSource(_class_of(model), model, seed)
    else:
        folder = os.fspath(model)
        source = PretrainedSource(folder, trust_remote_code=trust_remote_code, seed=seed)
    return WholeModel(source, example, train, packing, seed, new_rows)


def of_parts(model: MultimodalModule | WholeModel, what: str) -> MultimodalModule:
    """A model that is described by its parts.

    Args:
        model: any.
        what: is asked for, for the error.

    Raises:
        ModelError: it is a whole one.
    """
    if isinstance(model, WholeModel):
        raise ModelError(
            f"{what}; accepted for a model that is described by its parts, not for a whole model"
        )
    return model


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    if config.architectures:
        return find_model_class(config.architectures[0], config)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return cast(type[PreTrainedModel], auto._model_mapping[type(config)])
    raise ModelError(
        f"transformers has no model of text with images or sound for {type(config).__name__}; "
        "accepted: a config that names its architecture"
    )


class WholeModel:
    """A whole model, in towers and a language model.

    Args:
        source: of the model.
        example, train, packing, seed, new_rows: as of :func:`from_pretrained`.

    Attributes:
        towers: as its forward calls them.
        train: by part, how it is trained; what is not there, in full.
        packing: whether a microbatch's rows go through the text model as one.
        changing: modules whose parts a run freezes or trains as it goes: their weights, frozen or
            not, are in every checkpoint.

    Raises:
        ProbeError, ModelError: as of :func:`from_pretrained`.
    """

    def __init__(
        self, source: ModuleSource, example: Batch, train: Mapping[str, How] | None = None,
        packing: bool = False, seed: int = 0, new_rows: range = range(0),
    ) -> None:  # fmt: skip
        self.source, self.packing = source, packing
        self.example = {name: value for name, value in example.items() if name != LABELS}
        check_weights("the model", source)
        check_kind(source.skeleton())
        tried = of_one_that_runs(source, self._find)
        self.towers = tuple(
            in_own_depth(source, tower, tower.inputs(self.example) or {}) for tower in tried
        )
        self.train = dict(train or {})
        for name, value in self.train.items():
            is_mode = isinstance(value, LoraConfig) or value in (FULL, FROZEN)
            if name not in self.part_names or not is_mode:
                raise ModelError(
                    f"train has {name!r}: {value!r}; accepted: {FULL!r}, {FROZEN!r} or a "
                    f"LoraConfig, of {', '.join(self.part_names)}"
                )
        self.changing: frozenset[str] = frozenset()
        self._frozen = frozenset(n for n, how in self.train.items() if how == FROZEN)
        self._adapted = self._with_adapters(seed)
        if new_rows and LANGUAGE in self.adapters:
            self._adapted = NewRowsSource(self._adapted, new_rows.start, new_rows.stop)
            self._adapted.skeleton()  # raises if the head cannot have them
        self._whole: nn.Module | None = None
        self._roots: dict[str, RootForm] = {}
        # Of the language model, by which of it and of projectors are frozen.
        self._cuts: dict[tuple[bool, bool], tuple[CutInfo | None, bool]] = {}
        self._blocks: dict[str, int] = {}  # by module

    def _with_adapters(self, seed: int) -> ModuleSource:
        """The source, with the adapters of its parts.

        Raises:
            ModelError: a part has no such layers.
            ModelError: adapters that ``peft`` has no common file for.
        """
        source = self.source
        towers = tuple(place for tower in self.towers for place in tower.places)
        projector = tuple(place for _, place in self._projector)
        for name, lora in self.adapters.items():
            if name == LANGUAGE:
                outside = (*towers, *projector)
                source = AdaptedSource.of(source, lora, seed, outside, part=name)
                continue
            own = projector if name == PROJECTOR else self.tower(name).places
            apart = () if name == PROJECTOR else projector
            source = AdaptedSource.of(source, lora, seed, own, False, apart, name)
        if len({lora.dora for lora in self.adapters.values()}) > 1:
            raise ModelError("train has adapters with and without dora; accepted: the same for all")
        return source

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """By part that has some."""
        return {name: how for name, how in self.train.items() if isinstance(how, LoraConfig)}

    def _find(self, model: nn.Module) -> tuple[Tower, ...]:
        inputs = as_copied(self.source, model, self.example)
        return find_towers(cast(PreTrainedModel, model), inputs)

    @property
    def tower_names(self) -> tuple[str, ...]:
        """In the order in which the forward calls them."""
        return tuple(tower.name for tower in self.towers)

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """The towers, by what other models have in their place."""
        return self.tower_names

    @property
    def module_names(self) -> tuple[str, ...]:
        """The towers and the language model."""
        return (*self.tower_names, LANGUAGE_MODEL)

    @property
    def tower_inputs(self) -> dict[str, dict[str, str]]:
        """By tower, for each argument of its call which entry of a batch it is."""
        return {tower.name: dict(tower.arguments) for tower in self.towers}

    def tower(self, name: str) -> Tower:
        """One of them."""
        return next(tower for tower in self.towers if tower.name == name)

    def tower_spec(self, name: str) -> TowerSpec:
        """A tower as data for the ranks."""
        tower = self.tower(name)
        source = tower_source(
            self._adapted, tower, self.is_frozen(name), self.is_frozen(PROJECTOR)
        )
        if name not in self._blocks:
            self._blocks[name] = num_blocks(source.skeleton())
        return tower_spec(source, tower, self._blocks[name])

    @property
    def part_names(self) -> tuple[str, ...]:
        """What is trained, frozen, or has adapters; no projector if the model has none."""
        return (*self.tower_names, *((PROJECTOR,) if self._projector else ()), LANGUAGE)

    @property
    def _projector(self) -> list[tuple[str, str]]:
        """Names of modules, and in each of the projector's submodules and parameters."""
        within = [(tower.name, place) for tower in self.towers for place in tower.projector]
        behind = dict.fromkeys(place for tower in self.towers for place in tower.behind)
        return [*within, *((LANGUAGE_MODEL, place) for place in behind)]

    def is_frozen(self, name: str) -> bool:
        """Whether a part is; of a tower or the language model, all but what is of a projector."""
        return name in self._frozen

    def set_frozen(self, name: str, frozen: bool) -> None:
        """Freeze or train a part; of one with adapters these.

        Args:
            name: one of :attr:`part_names`.
            frozen: which of both.
        """
        self._frozen = self._frozen | {name} if frozen else self._frozen - {name}
        if name not in self.adapters:
            self.train[name] = FROZEN if frozen else FULL
        self._whole = None
        for cached in ("graph", "trained", "_parameters"):
            vars(self).pop(cached, None)

    def parameters_of(self, name: str) -> list[tuple[str, str]]:
        """Return a part's parameters: the module that each is in, and its name in the whole model.

        Args:
            name: one of :attr:`part_names`.
        """
        projector = self._projector
        places: dict[str, list[str]] = {}
        for module, place in projector:
            places.setdefault(module, []).append(place)
        own = LANGUAGE_MODEL if name == LANGUAGE else name
        return [
            (module, parameter) for module in self.module_names
            if name == PROJECTOR or module == own
            for parameter in self._parameters[module]
            if is_within(parameter, places.get(module, ())) == (name == PROJECTOR)
        ]

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Return, by part, how many elements of its parameters are trained, and how many it has."""
        return {
            name: counted(
                self._parameters[module][parameter]
                for module, parameter in self.parameters_of(name)
            )
            for name in self.part_names
        }

    @cached_property
    def _parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters on the meta device, by module and by their names in the whole model."""
        return {
            module: dict(self.spec(module).source.skeleton().named_parameters())
            for module in self.module_names
        }

    def root_form(self, name: str) -> RootForm:
        """What a tower's largest part returns, of which features of each item can be kept.

        Raises:
            ProbeError: they cannot.
        """
        if name not in self._roots:
            tower = self.tower(name)
            own = tower.inputs(self.example) or {}
            self._roots[name] = probe_root(self.tower_spec(name), tower.root, own)
        return self._roots[name]

    def spec(self, name: str) -> TowerSpec | WholeLanguageSpec:
        """A module as data for the ranks."""
        return self.language_spec() if name == LANGUAGE_MODEL else self.tower_spec(name)

    def language_spec(self) -> WholeLanguageSpec:
        """All but the towers as data for the ranks."""
        source = language_source(
            self._adapted, self.towers, self.is_frozen(LANGUAGE), self.is_frozen(PROJECTOR)
        )
        if LANGUAGE_MODEL not in self._blocks:
            self._blocks[LANGUAGE_MODEL] = num_blocks(source.skeleton())
        spec = language_spec(LANGUAGE_MODEL, source, self.towers, self._blocks[LANGUAGE_MODEL])
        return replace(spec, packing=self.packing, mixture=self.mixture)

    @plain_torch()
    def cut_language_spec(self) -> WholeLanguageSpec:
        """All but the towers as data for ranks of several stages.

        Raises:
            ProbeError: it cannot be cut.
        """
        spec, frozen = self.language_spec(), (self.is_frozen(LANGUAGE), self.is_frozen(PROJECTOR))
        if frozen not in self._cuts:
            cut = cut_language_model(spec, self.towers, self.example)
            self._cuts[frozen] = cut.cut, cut.relays
        cut, relays = self._cuts[frozen]
        return replace(spec, cut=cut, relays=relays)

    @cached_property
    def mixture(self) -> Mixture | None:
        """What it is as a mixture of experts; None if it is none.

        Raises:
            ProbeError: it adds something to its loss that stages of it cannot add up.
        """
        return mixture_of(self.source, self.example)

    @cached_property
    def graph(self) -> ModuleGraph:
        """Every tower feeds the language model."""
        nodes = []
        for name in self.tower_names:
            spec = self.tower_spec(name)
            skeleton = spec.source.skeleton()
            flags = trainable_blocks(skeleton, spec.num_blocks)
            if self.is_frozen(name):  # what is trained of it comes after its blocks
                flags = (*[False] * (len(flags) - 1), any_trainable(skeleton))
            nodes.append(ModuleNode(name, flags))
        language = self.language_spec()
        flags = trainable_blocks(language.source.skeleton(), language.num_blocks)
        nodes.append(ModuleNode(LANGUAGE_MODEL, flags))
        return ModuleGraph(tuple(nodes), tuple((n, LANGUAGE_MODEL) for n in self.tower_names), ())

    @cached_property
    def batch_check(self) -> WholeBatchCheck:
        """Looks whether the model can take a microbatch, without it."""
        return WholeBatchCheck.of(self.tower_inputs, self.example)

    def check(self, microbatch: Any) -> None:
        """
        Raises:
            DataError: it is not what the model's forward takes.
        """
        self.batch_check(microbatch)

    @cached_property
    def trained(self) -> dict[str, frozenset[str]]:
        """By module, the parameters that are, as the whole model names them."""
        specs = {name: self.tower_spec(name) for name in self.tower_names}
        return {
            module: frozenset(
                name for name, p in spec.source.skeleton().named_parameters() if p.requires_grad
            )
            for module, spec in {**specs, LANGUAGE_MODEL: self.language_spec()}.items()
        }

    def materialize(self) -> nn.Module:
        """The whole model in this process, for :meth:`loss`, with what is frozen."""
        if self._whole is None:
            model = self._with_frozen(self._adapted.build())
            self._whole = model.train(any(self.trained.values()))
            for module, training in self._modes().items():
                model.get_submodule(module).training = training
        return self._whole

    def _modes(self) -> dict[str, bool]:
        """By submodule, whether it is in training mode: as in the part that it is of."""
        modes = {
            name: module.training
            for name, module in self.language_spec().source.skeleton().named_modules()
        }
        for tower in self.towers:
            modes |= {
                name: module.training
                for name, module in self.tower_spec(tower.name).source.skeleton().named_modules()
                if is_within(name, tower.places)
            }
        return modes

    def trained_skeleton(self) -> nn.Module:
        """Its structure, with what is frozen."""
        return self._with_frozen(copy.deepcopy(self._adapted.skeleton()))

    def _with_frozen(self, model: nn.Module) -> nn.Module:
        trained = frozenset().union(*self.trained.values())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        return model

    def loss(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """A step's loss in this process, by the model's own forward: the sum over label tokens,
        divided by their number, and the routers' loss of a mixture of experts, over all of its
        tokens."""
        module = self.materialize()
        model = cast(Callable[..., Any], module)
        total = torch.zeros(())
        towers = [place for tower in self.towers for place in tower.places]
        routing, sums = Routing(module, self.mixture, towers), []
        try:
            for batch in microbatches:
                inputs = {name: value for name, value in batch.items() if name != LABELS}
                B, T = batch[LABELS].shape
                with routing.noted(routing.real(inputs.get("attention_mask"), (B, T))):
                    logits = model(**inputs, use_cache=False).logits
                total = total + F.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), batch[LABELS][:, 1:].flatten(),
                    ignore_index=IGNORE_INDEX, reduction="sum",
                )  # fmt: skip
                if (own := routing.sums()) is not None:
                    sums.append(own)
        finally:
            routing.detach()
        total = total / max(sum(map(label_tokens, microbatches)), 1)
        if self.mixture is not None and self.mixture.loss is not None:
            total = total + self.mixture.loss.whole(sums)
        return total


def label_tokens(microbatch: Batch) -> int:
    """How many tokens of it are to be predicted."""
    return int((microbatch[LABELS][:, 1:] != IGNORE_INDEX).sum())
