"""Common interface of models, which plans, trainers, checkpoints and batch checks use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from raymm.actors.experts.router_loss import Mixture
from raymm.actors.stages.stage_hook import StageHook, StageHooks, check_stage_hook
from raymm.actors.stages.token_loss import TokenLoss
from raymm.errors import ModelError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.features import GENERATION, STAGE_HOOKS, Feature, Kind
from raymm.model.module import Module
from raymm.scheduler.graph.module_graph import ModuleGraph

# Modes of a part: its weights (or its adapters) are trained, or nothing is.
FULL, FROZEN = "full", "frozen"
LANGUAGE_MODEL = "llm"
"""Name of the language model among a model's modules; no encoder may have it."""


class Model(ABC):
    """Description of a model: modules, their graph, and what its loss needs.

    Attributes:
        kind: how the model is described.
        graph: modules and the edges between them.
        packing: True if the rows of a microbatch run as one sequence without padding.
        preference: loss for pairs of answers; None for cross entropy.
        token_loss: custom loss in place of the cross entropy of tokens.
        mixture: mixture of experts of the language model; None for a dense model.
        changing: modules that a run freezes or unfreezes while it trains; their weights are in all
            checkpoints, frozen or not.
        stage_hooks: hooks of each encoder, in their order; see :meth:`add_stage_hook`.
        vocabulary: number of token ids that the language model has embeddings for.
        tower_inputs: for a Hugging Face VLM, entry of a batch by tower and argument of its call.
        module_names: all modules; the language model is last.
        encoder_names: modules that feed the language model.
        text_module: name of the language model; empty for a graph.
        computed_attention: modules whose attention raymm computes under every plan.
        separate_features: True if cached features replace the first stage of an encoder; False if
            that stage also runs what follows them.
        adapts_language: True if adapters of the language model are trained, not its weights.
        language_field: field of a configuration that says how the language model is trained.
        rows_in_layout: True if the layout of messages depends on the rows' lengths and items.
    """

    kind: Kind
    graph: ModuleGraph
    packing: bool = False
    preference: PreferenceLoss | None = None
    token_loss: TokenLoss | None = None
    mixture: Mixture | None = None
    changing: frozenset[str] = frozenset()
    stage_hooks: Mapping[str, tuple[StageHook, ...]] = {}
    vocabulary: int | None = None
    tower_inputs: Mapping[str, Mapping[str, str]] = {}
    module_names: tuple[str, ...] = ()
    encoder_names: tuple[str, ...] = ()
    text_module: str = ""
    computed_attention: frozenset[str] = frozenset()
    separate_features: bool = False
    adapts_language: bool = False
    language_field: str = "model.language_model.train"
    rows_in_layout: bool = False

    @abstractmethod
    def module(self, name: str) -> Module:
        """Return a module, which plans cut, shard and build."""

    @abstractmethod
    def spec(self, name: str) -> Any:
        """Return the spec of a module for the ranks."""

    @abstractmethod
    def materialize(self) -> nn.Module:
        """Load all weights into this process and return the module that has them."""

    @abstractmethod
    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Return (trained elements, all elements) of the parameters, by part."""

    @abstractmethod
    def reloadable(self) -> frozenset[str]:
        """Return the modules whose frozen weights checkpoints need not contain."""

    @abstractmethod
    def parameter_name(self, module: str, name: str) -> str:
        """Return the model's name for a parameter that stages of a module name ``name``."""

    def add_stage_hook(self, module: str, hook: StageHook) -> None:
        """Attach a hook to an encoder, after the hooks that it has.

        Raises:
            ModelError: the model has no such encoder, or ``hook`` is not accepted.
        """
        self.require(STAGE_HOOKS)
        if module not in self.encoder_names:
            raise ModelError(
                f"a stage hook is for {module!r}; accepted: encoders of the model "
                f"({', '.join(self.encoder_names) or 'none'})"
            )
        check_stage_hook(hook)
        self.stage_hooks = {
            **self.stage_hooks, module: (*self.stage_hooks.get(module, ()), hook)
        }

    def hooks_of(self, module: str) -> StageHooks | None:
        """Return the hooks of a complete module; None without."""
        hooks = self.stage_hooks.get(module)
        return None if hooks is None else StageHooks(module, hooks)

    def set_changing(self, modules: Iterable[str]) -> None:
        """Set the modules that a run freezes or unfreezes while it trains."""
        self.changing = frozenset(modules)

    def mode(self, name: str) -> str:
        """Return the current mode of a part, :data:`FULL` or :data:`FROZEN`. Raises ModelError if
        the model has no such part, or the part is partly frozen."""
        raise NotImplementedError(f"{type(self).__name__} are not frozen during a run")

    def set_frozen(self, name: str, frozen: bool) -> None:
        """Freeze or unfreeze a part; with adapters, only the adapters change."""
        raise NotImplementedError(f"{type(self).__name__} are not frozen during a run")

    def modules_of(self, name: str) -> set[str]:
        """Return the modules that contain a part."""
        return {name}

    def state_prefixes(self, name: str) -> tuple[str, ...]:
        """Return the prefixes of a part's optimizer state names, after ``optimizer/``."""
        return (f"{name}/",)

    def give_examples(self, items: Callable[[], Mapping[str, dict[str, Any]]]) -> None:
        """Set one item as example inputs of each encoder that has none.

        Args:
            items: returns the inputs of an item by encoder.
        """
        return

    def check_run(self, from_files: bool, planned: bool) -> None:
        """Raise ModelError if a trainer cannot run the model.

        Args:
            from_files: True if data workers load the data.
            planned: True if a plan is given.
        """
        return

    def check_unshared(self) -> None:
        """Raise ModelError if modules share parameters."""
        return

    def check_generates(self) -> None:
        """Raise ModelError if the model cannot generate text."""
        self.require(GENERATION)

    def check_loss(self) -> None:
        """Raise a ProbeError if the model computes another loss than the one that is trained."""
        return

    def require(self, feature: Feature, field: str = "") -> None:
        """Raise a ModelError if models of this kind lack a feature.

        Args:
            field: what asks for the feature, such as a field and its value; by default the
                feature's title.
        """
        if reason := feature.reason(self.kind):
            kinds = " and ".join(kind for kind in Kind if not feature.reason(kind))
            raise ModelError(
                f"{field or feature.title}; accepted for {kinds}, not for {self.kind}: {reason}"
            )


def only_loss(
    preference: PreferenceLoss | None, token_loss: TokenLoss | None
) -> TokenLoss | None:
    """Return a custom loss of tokens. Raise a ModelError if there is also a preference loss."""
    if preference is not None and token_loss is not None:
        raise ModelError("preference and token_loss are given; accepted: one of them")
    return token_loss
