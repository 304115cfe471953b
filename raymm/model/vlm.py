"""A published vision-language or audio-language model, described by its folder or configuration.

The model's own forward runs on the ranks of the language model. Its towers are found by running the
forward on an example. They are separate modules, whose features are inserted where the forward
calls them.
"""

from __future__ import annotations

import inspect
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

from raymm.actors.adapters.lora import disable_dropout, without_adapters
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
from raymm.actors.probe.vlm.cut import (
    cut_language_model,
    in_own_depth,
    language_source,
    language_spec,
    tower_source,
    tower_spec,
)
from raymm.actors.probe.vlm.kept_root import probe_root
from raymm.actors.probe.vlm.towers import Tower, as_copied, check_kind, find_towers
from raymm.actors.stages.token_loss import TokenLoss
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import VlmLanguageSpec
from raymm.actors.weights.adapted_source import AdaptedSource, NewRowsSource
from raymm.actors.weights.model_classes import find_model_class
from raymm.actors.weights.model_part import PartSource, is_within
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource, ModuleSource
from raymm.errors import ModelError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.batch_rules import LABELS, Vocabulary
from raymm.model.features import Kind
from raymm.model.modality_module import check_weights
from raymm.model.model import FROZEN, FULL, LANGUAGE_MODEL, Model, only_loss
from raymm.model.module import Module, TowerModule, VlmLanguageModule
from raymm.model.trainable_layers import any_trainable, counted, trainable_blocks
from raymm.model.vlm_batch import VlmBatchCheck
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode

LANGUAGE, PROJECTOR = "language_model", "projector"
Batch = Mapping[str, torch.Tensor]
# Training mode of a part: full, frozen, or by adapters.
How = str | LoraConfig


def from_pretrained(
    model: str | os.PathLike[str] | PretrainedConfig, example: Batch,
    train: Mapping[str, How] | None = None, *, seed: int = 0, trust_remote_code: bool = False,
    packing: bool = False, new_rows: range = range(0), preference: PreferenceLoss | None = None,
    token_loss: TokenLoss | None = None,
) -> PretrainedVlm:  # fmt: skip
    """Describe a model from a ``save_pretrained`` folder, or from a configuration with random
    weights.

    No weights are read here: each rank reads its own tensors.

    Args:
        model: the folder, or a configuration that names its architecture.
        example: output of the model's processor for a batch with items of every modality that is
            trained on; the towers are found with it.
        train: by part, ``"full"`` (default), ``"frozen"``, or adapters (:class:`raymm.LoraConfig`),
            under which the weights stay unchanged. Parts are ``"language_model"``, ``"projector"``
            (everything between towers and language model), and the towers, ``"vision"``,
            ``"audio"``.
        seed: seed of random weights.
        trust_remote_code: see :class:`raymm.ModalityModule`.
        packing: True to run a microbatch's rows through the text model as one sequence without
            padding, each a separate document.
        new_rows: ids of new tokens, whose rows of the embedding and the head are trained next to
            adapters of ``"language_model"``. The folder has their initial values.
        preference: the loss for pairs of answers, see :class:`raymm.MultimodalModule`; both rows of
            a pair have the items of the prompt.
        token_loss: loss in place of the cross entropy of tokens, see
            :class:`raymm.MultimodalModule`.

    Raises:
        ModelError: the folder is incomplete, or ``train`` names an unknown part.
        ProbeError: the model does not run on the example, or no towers are found in it.
    """
    if isinstance(model, PretrainedConfig):
        source: PretrainedSource | ConfigSource = ConfigSource(_class_of(model), model, seed)
    else:
        folder = os.fspath(model)
        source = PretrainedSource(folder, trust_remote_code=trust_remote_code, seed=seed)
    return PretrainedVlm(source, example, train, packing, new_rows, preference, token_loss)


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


class PretrainedVlm(Model):
    """A whole model, split into towers and a language model. See :func:`from_pretrained` for
    arguments and errors.

    Attributes:
        towers: in the order of the forward's calls.
        train: training mode by part; parts that are absent are fully trained.
    """

    kind = Kind.VLM
    language_field = "model.train.language_model"
    text_module = LANGUAGE_MODEL

    def __init__(
        self, source: PretrainedSource | ConfigSource, example: Batch,
        train: Mapping[str, How] | None = None, packing: bool = False, new_rows: range = range(0),
        preference: PreferenceLoss | None = None, token_loss: TokenLoss | None = None,
    ) -> None:  # fmt: skip
        self.source, self.packing, self.preference = source, packing, preference
        self.token_loss = only_loss(preference, token_loss)
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
        self._frozen = frozenset(n for n, setting in self.train.items() if setting == FROZEN)
        self._adapted = self._with_adapters(source.seed)
        if new_rows and LANGUAGE in self.adapters:
            self._adapted = NewRowsSource(self._adapted, new_rows.start, new_rows.stop)
            self._adapted.skeleton()  # raises if the head cannot have them
        self._whole: nn.Module | None = None
        self._roots: dict[str, RootForm] = {}
        # Cuts of the language model, by (language model frozen, projector frozen).
        self._cuts: dict[tuple[bool, bool], tuple[CutInfo | None, bool]] = {}
        # By module, and by what is frozen in it, since a source keeps what it has built.
        self._sources: dict[tuple[str, bool, bool], PartSource] = {}

    def _with_adapters(self, seed: int) -> ModuleSource:
        source = self.source
        towers = tuple(path for tower in self.towers for path in tower.places)
        projector = tuple(path for _, path in self._projector)
        for name, lora in self.adapters.items():
            if name == LANGUAGE:
                excluded_paths = (*towers, *projector)
                source = AdaptedSource.of(source, lora, seed, excluded_paths, part=name)
                continue
            path_filter = projector if name == PROJECTOR else self.tower(name).places
            excluded = () if name == PROJECTOR else projector
            source = AdaptedSource.of(source, lora, seed, path_filter, False, excluded, name)
        if len({lora.dora for lora in self.adapters.values()}) > 1:
            raise ModelError("train has adapters with and without dora; accepted: the same for all")
        return source

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        return {name: value for name, value in self.train.items() if isinstance(value, LoraConfig)}

    def _find(self, model: nn.Module) -> tuple[Tower, ...]:
        inputs = as_copied(self.source, model, self.example)
        return find_towers(cast(PreTrainedModel, model), inputs)

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Names of the towers in the order of the forward's calls."""
        return tuple(tower.name for tower in self.towers)

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """Names of the towers, under the attribute that other models have."""
        return self.tower_names

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the towers, then of the language model."""
        return (*self.tower_names, LANGUAGE_MODEL)

    @property
    def tower_inputs(self) -> dict[str, dict[str, str]]:
        """Entry of a batch by tower and argument of its call."""
        return {tower.name: dict(tower.arguments) for tower in self.towers}

    def tower(self, name: str) -> Tower:
        return next(tower for tower in self.towers if tower.name == name)

    def tower_spec(self, name: str) -> TowerSpec:
        """Return the spec of a tower for the ranks."""
        tower = self.tower(name)
        key = name, self.is_frozen(name), self.is_frozen(PROJECTOR)
        if key not in self._sources:
            self._sources[key] = tower_source(self._adapted, tower, *key[1:])
        source = self._sources[key]
        spec = tower_spec(source, tower, num_blocks(source.skeleton()))
        return replace(spec, disable_dropout=self._disables_dropout)

    @property
    def _disables_dropout(self) -> bool:
        return self.preference is not None and self.preference.disable_dropout

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that can be trained, frozen or adapted."""
        return (*self.tower_names, *((PROJECTOR,) if self._projector else ()), LANGUAGE)

    @property
    def _projector(self) -> list[tuple[str, str]]:
        """(module, path) of the projector's submodules and parameters."""
        in_towers = [(tower.name, path) for tower in self.towers for path in tower.projector]
        behind = dict.fromkeys(path for tower in self.towers for path in tower.behind)
        return [*in_towers, *((LANGUAGE_MODEL, path) for path in behind)]

    def is_frozen(self, name: str) -> bool:
        """Return True if a part is frozen; the projector's layers in a tower do not count."""
        return name in self._frozen

    @property
    def computed_attention(self) -> frozenset[str]:
        return frozenset({LANGUAGE_MODEL} if self.packing else ())

    @property
    def adapts_language(self) -> bool:
        return LANGUAGE in self.adapters

    @property
    def vocabulary(self) -> int | None:
        return Vocabulary.of(self.source.skeleton()).ids

    @property
    def rows_in_layout(self) -> bool:
        return self.packing

    def reloadable(self) -> frozenset[str]:
        return frozenset(self.module_names) - self.changing

    def parameter_name(self, module: str, name: str) -> str:
        return name.removeprefix("module.")

    def mode(self, name: str) -> str:
        if name not in self.part_names:
            accepted = ", ".join(self.part_names)
            raise ModelError(
                f"at names {name!r}, which is not a part of the model; accepted: {accepted}"
            )
        return FROZEN if self.is_frozen(name) else FULL

    def modules_of(self, name: str) -> set[str]:
        return {module for module, _ in self.parameters_of(name)}

    def state_prefixes(self, name: str) -> tuple[str, ...]:
        return tuple(f"{module}/module.{p}" for module, p in self.parameters_of(name))

    def check_generates(self) -> None:
        skeleton = self.source.skeleton()
        if self.packing or not getattr(skeleton, "can_generate", bool)():
            raise ModelError(
                "to generate text, a Hugging Face VLM must not pack its rows, and transformers "
                f"must be able to generate with its class; packing is {self.packing}, the class is "
                f"{type(skeleton).__name__}"
            )
        needed = [
            name for name, parameter in inspect.signature(skeleton.forward).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if needed:
            raise ModelError(
                f"to generate text, the forward of a Hugging Face VLM must not need more than "
                f"tokens; {type(skeleton).__name__} always needs {', '.join(needed)}"
            )

    def set_frozen(self, name: str, frozen: bool) -> None:
        self._frozen = self._frozen | {name} if frozen else self._frozen - {name}
        if name not in self.adapters:
            self.train[name] = FROZEN if frozen else FULL
        self._whole = None
        for cached in ("graph", "trained", "_parameters"):
            vars(self).pop(cached, None)

    def parameters_of(self, name: str) -> list[tuple[str, str]]:
        """Return (module, name in the whole model) for the parameters of a part."""
        projector = self._projector
        projector_paths: dict[str, list[str]] = {}
        for module, path in projector:
            projector_paths.setdefault(module, []).append(path)
        part_module = LANGUAGE_MODEL if name == LANGUAGE else name
        return [
            (module, parameter) for module in self.module_names
            if name == PROJECTOR or module == part_module
            for parameter in self._parameters[module]
            if is_within(parameter, projector_paths.get(module, ())) == (name == PROJECTOR)
        ]

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Return (trained elements, all elements) of the parameters, by part."""
        return {
            name: counted(
                self._parameters[module][parameter]
                for module, parameter in self.parameters_of(name)
            )
            for name in self.part_names
        }

    @cached_property
    def _parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters on the meta device, by module and by name in the whole model."""
        return {
            module: dict(self.spec(module).source.skeleton().named_parameters())
            for module in self.module_names
        }

    def root_form(self, name: str) -> RootForm:
        """Return the form of the output of a tower's largest part, whose features per item can be
        cached. Raises ProbeError if the features cannot be cached."""
        if name not in self._roots:
            tower = self.tower(name)
            tower_inputs = tower.inputs(self.example) or {}
            self._roots[name] = probe_root(self.tower_spec(name), tower.root, tower_inputs)
        return self._roots[name]

    def module(self, name: str) -> Module:
        if name == LANGUAGE_MODEL:
            return VlmLanguageModule(
                self.language_spec(), self.cut_language_spec, self.towers, self.example
            )
        inputs = self.tower(name).inputs(self.example) or {}
        return TowerModule(self.tower_spec(name), inputs, self.root_form)

    def spec(self, name: str) -> TowerSpec | VlmLanguageSpec:
        """Return the spec of a module for the ranks."""
        return self.language_spec() if name == LANGUAGE_MODEL else self.tower_spec(name)

    def language_spec(self) -> VlmLanguageSpec:
        """Return the spec of everything but the towers for the ranks."""
        key = LANGUAGE_MODEL, self.is_frozen(LANGUAGE), self.is_frozen(PROJECTOR)
        if key not in self._sources:
            self._sources[key] = language_source(self._adapted, self.towers, *key[1:])
        source = self._sources[key]
        spec = language_spec(LANGUAGE_MODEL, source, self.towers, num_blocks(source.skeleton()))
        return replace(
            spec, packing=self.packing, mixture=self.mixture, preference=self.preference,
            token_loss=self.token_loss,
        )

    @plain_torch()
    def cut_language_spec(self) -> VlmLanguageSpec:
        """Return the spec of everything but the towers for several stages. Raises ProbeError if the
        language model cannot be cut."""
        spec, frozen = self.language_spec(), (self.is_frozen(LANGUAGE), self.is_frozen(PROJECTOR))
        if frozen not in self._cuts:
            cut = cut_language_model(spec, self.towers, self.example)
            self._cuts[frozen] = cut.cut, cut.relays
        cut, relays = self._cuts[frozen]
        return replace(spec, cut=cut, relays=relays)

    @cached_property
    def mixture(self) -> Mixture | None:
        """Mixture of experts of the model; None if it has none. Raises ProbeError if the model adds
        a term to its loss that stages cannot add up."""
        return mixture_of(self.source, self.example)

    @cached_property
    def graph(self) -> ModuleGraph:
        """Graph in which every tower feeds the language model."""
        nodes = []
        for name in self.tower_names:
            spec = self.tower_spec(name)
            skeleton = spec.source.skeleton()
            flags = trainable_blocks(skeleton, spec.num_blocks)
            if self.is_frozen(name):  # only layers after the blocks are trained
                flags = (*[False] * (len(flags) - 1), any_trainable(skeleton))
            nodes.append(ModuleNode(name, flags))
        language = self.language_spec()
        flags = trainable_blocks(language.source.skeleton(), language.num_blocks)
        nodes.append(ModuleNode(LANGUAGE_MODEL, flags))
        return ModuleGraph(tuple(nodes), tuple((n, LANGUAGE_MODEL) for n in self.tower_names), ())

    @cached_property
    def batch_check(self) -> VlmBatchCheck:
        """Check of microbatches that does not need the model."""
        return VlmBatchCheck.of(self.tower_inputs, self.example)

    def check(self, microbatch: Any) -> None:
        """Raise a DataError if the model's forward does not accept a microbatch."""
        self.batch_check(microbatch)

    @cached_property
    def trained(self) -> dict[str, frozenset[str]]:
        """Names of the trained parameters in the whole model, by module."""
        specs = {name: self.tower_spec(name) for name in self.tower_names}
        return {
            module: frozenset(
                name for name, p in spec.source.skeleton().named_parameters() if p.requires_grad
            )
            for module, spec in {**specs, LANGUAGE_MODEL: self.language_spec()}.items()
        }

    def materialize(self) -> nn.Module:
        """Return the whole model in this process, with its frozen parameters set, for
        :meth:`loss`."""
        if self._whole is None:
            model = self._with_frozen(self._adapted.build())
            if self._disables_dropout:
                disable_dropout(model)
            self._whole = model.train(any(self.trained.values()))
            for module, training in self._modes().items():
                model.get_submodule(module).training = training
        return self._whole

    def _modes(self) -> dict[str, bool]:
        """Return the training mode of each submodule, which is that of its part."""
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
        """Return the structure of the model, with its frozen parameters set."""
        return self._with_frozen(self._adapted.new_skeleton())

    def _with_frozen(self, model: nn.Module) -> nn.Module:
        trained = frozenset().union(*self.trained.values())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        return model

    def loss(
        self, microbatches: Sequence[Batch], references: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return a step's loss, computed in this process by the model's own forward.

        The loss is the sum over label tokens divided by their number, or the mean over pairs of
        answers, plus the router loss of a mixture of experts over all tokens.

        Args:
            references: (B,) log-probabilities of the reference by microbatch, for pairs of answers;
                by default :meth:`scores`.

        Raises:
            ModelError: references are needed, because the reference is the initial model.
        """
        scores, router_loss = self._forward(microbatches)
        if self.preference is None:
            total = -torch.cat(scores).sum() / max(sum(map(label_tokens, microbatches)), 1)
            return total + router_loss
        if references is None:
            if self.preference.asked_once:
                raise ModelError(
                    "references is None; give each row's log-probability under the initial weights"
                )
            references = self.scores(microbatches)
        rows = torch.cat(scores)
        return self.preference(rows, torch.cat(list(references))) / (len(rows) // 2) + router_loss

    def scores(self, microbatches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's labels by microbatch, (B,), without adapters
        and gradients."""
        with torch.no_grad(), without_adapters(self.materialize()):
            return self._forward(microbatches)[0]

    def _forward(self, microbatches: Sequence[Batch]) -> tuple[list[torch.Tensor], Any]:
        """Return the log-probabilities of each row's labels by microbatch, and the router loss."""
        if self.stage_hooks:
            raise ModelError(
                "the model has stage hooks, which run on ranks only; accepted: a model without "
                "them, or a training step (ParallelModel)"
            )
        module = self.materialize()
        model = cast(Callable[..., Any], module)
        scores = []
        towers = [path for tower in self.towers for path in tower.places]
        routing, sums = Routing(module, self.mixture, towers), []
        try:
            for batch in microbatches:
                inputs = {name: value for name, value in batch.items() if name != LABELS}
                B, T = batch[LABELS].shape
                with routing.noted(routing.real(inputs.get("attention_mask"), (B, T))):
                    logits = model(**inputs, use_cache=False).logits
                losses = self._losses(
                    logits[:, :-1].flatten(0, 1).float(), batch[LABELS][:, 1:].flatten()
                )
                scores.append(-losses.view(B, T - 1).sum(1))
                if (router_sums := routing.sums()) is not None:
                    sums.append(router_sums)
        finally:
            routing.detach()
        router_loss = None if self.mixture is None else self.mixture.loss
        return scores, 0.0 if router_loss is None else router_loss.whole(sums)


    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of tokens, 0 without a label."""
        if self.token_loss is None:
            return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        has_label = labels != IGNORE_INDEX
        losses = self.token_loss(logits[has_label], labels[has_label]).float()
        return torch.zeros_like(logits[:, 0]).masked_scatter(has_label, losses)


def label_tokens(microbatch: Batch) -> int:
    """Return the number of label tokens of a microbatch."""
    return int((microbatch[LABELS][:, 1:] != IGNORE_INDEX).sum())
