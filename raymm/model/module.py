"""Modules of a model: what plans need to cut, shard and build each of them.

Each kind of module tries its code on a small replica, with its example inputs, to find out whether
it can be cut, and whether processes can split its tokens, its samples or its parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from raymm.actors.features.root_features import RootForm
from raymm.actors.modules.blocks import find_blocks
from raymm.actors.probe.attention import find_mixers, probe_shared_tokens
from raymm.actors.probe.callbacks import Cuts, check_chain, module_inputs, probe_chain
from raymm.actors.probe.cut import draws_of_training, probe_language_model
from raymm.actors.probe.items import probe_shared_items
from raymm.actors.probe.node import probe_node, read_of
from raymm.actors.probe.outputs import check_node_history
from raymm.actors.probe.stage_comparison import TrainingDraws
from raymm.actors.probe.tensor import probe_tensor
from raymm.actors.probe.vlm.cut import cut_tower
from raymm.actors.probe.vlm.history import check_vlm_history
from raymm.actors.probe.vlm.shares import (
    draws_of_training_in,
    probe_item_tokens,
    probe_items,
    probe_packing,
    probe_rows,
    probe_tokens,
    probe_vlm_tensor,
)
from raymm.actors.probe.vlm.towers import Tower
from raymm.actors.probe.vlm.trials import leaves_out_zeros
from raymm.actors.sharding.sample_rows import count_items
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage, encoder_stage_parameters
from raymm.actors.stages.feature_stage import FeatureStage
from raymm.actors.stages.language import (
    LanguageSpec,
    LanguageStage,
    language_stage_parameters,
)
from raymm.actors.stages.node import NodeStage, NodeStageSpec
from raymm.actors.stages.tower import FeaturedTowerStage, TowerSpec, TowerStage
from raymm.actors.stages.vlm_language import VlmLanguageSpec, VlmLanguageStage
from raymm.errors import ModelError, PlanError, ProbeError
from raymm.model.ports import merged_arguments
from raymm.scheduler.graph.module_graph import Port
from raymm.scheduler.plan.plan import Stage

Inputs = Mapping[str, Any]


class Module(ABC):
    """Module of a model under a plan.

    Attributes:
        name: name in plans.
        spec: description of the uncut module for the ranks.
        causal: True for a language model, which predicts each token from those before it.
        stage_parameters: returns the names of the parameters that layers [lo, hi) of a spec own.
    """

    causal = False
    stage_parameters: Callable[[Any, int, int], list[str]] = staticmethod(encoder_stage_parameters)

    def __init__(self, spec: Any) -> None:
        self.name, self.spec = spec.name, spec

    @abstractmethod
    def cut(self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False) -> Any:
        """Return the spec of the module for stages between these cuts.

        Args:
            ports: inputs from other modules that its layers read.
            cached: True if features of its first stage are cached.

        Raises:
            ProbeError: the module cannot be cut.
        """

    @abstractmethod
    def share_tokens(self, spec: Any) -> Any:
        """Return the spec for processes that split tokens. Raises ProbeError if the module's code
        does not allow that."""

    @abstractmethod
    def share_rows(self, spec: Any) -> Any:
        """Return the spec for processes that split samples. Raises ProbeError or PlanError if the
        module's code does not allow that."""

    @abstractmethod
    def draws(self, spec: Any, first: Stage, cuts_rows: bool) -> TrainingDraws:
        """Return the random decisions of the module in training."""

    @abstractmethod
    def tensor_plan(self, spec: Any, tp: int) -> TensorPlan:
        """Return the shards of the module's parameters over ``tp`` processes. Raises ProbeError if
        the module's code does not allow them, and PlanError if its sizes do not."""

    @abstractmethod
    def stage_class(self, lo: int, cached: bool) -> Any:
        """Return the class of the stage that begins with layer ``lo``."""

    def retry(
        self, spec: Any, cuts: Cuts, first: Stage, plans: Mapping[str, Any]
    ) -> Callable[[Inputs], None] | None:
        """Return a function that raises a ProbeError if the stages and ``plans`` of shards do not
        suit other inputs; None if all inputs suit them."""
        return None


class _Probed(Module):
    """Module whose source is tried by itself, on its example inputs if there are any."""

    def __init__(self, spec: Any, example: Inputs | None = None) -> None:
        super().__init__(spec)
        self.example = example

    def _inputs(self, spec: Any) -> dict[str, Any] | None:
        return None if self.example is None else module_inputs(spec, self.example)

    def share_tokens(self, spec: Any) -> Any:
        probe_shared_items(spec.source, self._inputs(spec), read_of(spec))
        return spec

    def share_rows(self, spec: Any) -> Any:
        if (inputs := self._inputs(spec)) is not None:
            try:
                count_items(inputs, self.name)
            except ModelError as error:
                raise PlanError(f"sharding of {self.name!r}: {error}") from None
        return spec

    def draws(self, spec: Any, first: Stage, cuts_rows: bool) -> TrainingDraws:
        packed = getattr(spec, "packing", False)
        try:
            return draws_of_training(
                spec.source, self.causal, self._inputs(spec), read_of(spec),
                cuts_rows=cuts_rows and not packed,
            )
        except ProbeError:
            has_blocks = find_blocks(spec.source.skeleton()) is not None
            if max(first.cp, first.fsdp) > 1 and has_blocks:
                raise
            return TrainingDraws()  # not every module of a graph can be tried alone

    def tensor_plan(self, spec: Any, tp: int) -> TensorPlan:
        return probe_tensor(spec.source, tp, self.name, self._inputs(spec), read_of(spec))


class EncoderModule(_Probed):
    """Encoder with its projector."""

    def cut(
        self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False
    ) -> EncoderSpec:
        return probe_chain(self.spec, cuts, self.example)

    def stage_class(self, lo: int, cached: bool) -> type[EncoderStage]:
        return FeatureStage if cached and not lo else EncoderStage

    def retry(
        self, spec: Any, cuts: Cuts, first: Stage, plans: Mapping[str, Any]
    ) -> Callable[[Inputs], None] | None:
        if not cuts and max(first.tp, first.cp) == 1:
            return None
        return partial(_try_inputs, spec, cuts, first, plans)


def _try_inputs(
    spec: EncoderSpec, cuts: Cuts, stage: Stage, plans: Mapping[str, Any], example: Inputs
) -> None:
    check_chain(spec, cuts, example)
    inputs = module_inputs(spec, example) if max(stage.tp, stage.cp) > 1 else None
    if stage.cp > 1:
        with refused(f"cp of {spec.name!r} is {stage.cp}; accepted: 1"):
            probe_shared_items(spec.source, inputs, read_of(spec))
    if stage.tp > 1 and probe_tensor(spec.source, stage.tp, spec.name, inputs) != plans["module"]:
        raise ProbeError(
            f"tp of {spec.name!r} is {stage.tp}, and these inputs need other shards of it"
        )


class NodeModule(_Probed):
    """Module of a graph.

    Args:
        reads_every: True if it reads the outputs of all samples at once.
        backward: modules of the graph that have a backward.
    """

    def __init__(
        self, spec: NodeStageSpec, example: Inputs | None, reads_every: bool,
        backward: Collection[str],
    ) -> None:
        super().__init__(spec, example)
        self._reads_every, self._backward = reads_every, backward

    def cut(
        self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False
    ) -> NodeStageSpec:
        spec = replace(self.spec, ports=ports)
        check_node_history(spec, self.example)
        return probe_node(spec, cuts, self.example, self._backward)

    def share_rows(self, spec: Any) -> Any:
        if self._reads_every:
            raise PlanError(
                f"sharding of {self.name!r} is 'fsdp', but the module reads every(); accepted: "
                "'none', 'zero1'"
            )
        return super().share_rows(spec)

    def stage_class(self, lo: int, cached: bool) -> type[EncoderStage]:
        return NodeStage


class LanguageModule(_Probed):
    """Language model of a model of parts."""

    causal = True
    stage_parameters = staticmethod(language_stage_parameters)

    def cut(
        self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False
    ) -> LanguageSpec:
        spec = replace(self.spec, ports=ports)
        if not cuts.blocks:
            return spec
        arguments = partial(merged_arguments, spec) if ports else None
        return replace(spec, cut=probe_language_model(spec.source, arguments))

    def share_tokens(self, spec: Any) -> Any:
        mixers = spec.mixers or find_mixers(spec.source)
        probe_shared_tokens(spec.source, spec.mask is not None, mixers)
        return replace(spec, mixers=mixers)

    def share_rows(self, spec: Any) -> Any:
        return spec

    def stage_class(self, lo: int, cached: bool) -> type[LanguageStage]:
        return LanguageStage


class TowerModule(Module):
    """Tower of a Hugging Face VLM.

    Args:
        inputs: arguments of its call on the model's example.
        root_form: returns the form of the features that can be cached.
    """

    def __init__(
        self, spec: TowerSpec, inputs: Inputs, root_form: Callable[[str], RootForm]
    ) -> None:
        super().__init__(spec)
        self._inputs, self._root_form = inputs, root_form

    def cut(self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False) -> TowerSpec:
        spec = self.spec
        check_vlm_history(spec, (), self._inputs)
        if cuts.blocks:
            spec = cut_tower(spec, self._inputs)
        return replace(spec, root=self._root_form(self.name)) if cached else spec

    def share_tokens(self, spec: Any) -> Any:
        probe_item_tokens(spec, self._inputs)
        return spec

    def share_rows(self, spec: Any) -> Any:
        return replace(
            spec, layers=probe_items(spec, self._inputs),
            zeros_left_out=leaves_out_zeros(spec, self._inputs),
        )

    def draws(self, spec: Any, first: Stage, cuts_rows: bool) -> TrainingDraws:
        return draws_of_training_in(spec, (), self._inputs)

    def tensor_plan(self, spec: Any, tp: int) -> TensorPlan:
        return probe_vlm_tensor(spec, tp, (), self._inputs)

    def stage_class(self, lo: int, cached: bool) -> type[EncoderStage]:
        return FeaturedTowerStage if cached else TowerStage


class VlmLanguageModule(Module):
    """Hugging Face VLM without its towers.

    Args:
        cut: returns the spec for several stages.
        towers: all towers of the model.
        example: inputs of the model's forward.
    """

    causal = True
    stage_parameters = staticmethod(language_stage_parameters)

    def __init__(
        self, spec: VlmLanguageSpec, cut: Callable[[], VlmLanguageSpec],
        towers: tuple[Tower, ...], example: Inputs,
    ) -> None:
        super().__init__(spec)
        self._cut, self._tried_with = cut, (towers, example)

    def cut(
        self, cuts: Cuts, ports: tuple[Port, ...] = (), cached: bool = False
    ) -> VlmLanguageSpec:
        check_vlm_history(self.spec, *self._tried_with)
        spec = self._cut() if cuts.blocks else self.spec
        if spec.packing:
            with refused("packing is true; accepted: false"):
                spec = replace(spec, mixers=probe_packing(spec, *self._tried_with))
        return spec

    def share_tokens(self, spec: Any) -> Any:
        return replace(spec, mixers=probe_tokens(spec, *self._tried_with))

    def share_rows(self, spec: Any) -> Any:
        probe_rows(spec, *self._tried_with)
        return spec

    def draws(self, spec: Any, first: Stage, cuts_rows: bool) -> TrainingDraws:
        return draws_of_training_in(spec, *self._tried_with)

    def tensor_plan(self, spec: Any, tp: int) -> TensorPlan:
        return probe_vlm_tensor(spec, tp, *self._tried_with)

    def stage_class(self, lo: int, cached: bool) -> type[LanguageStage]:
        return VlmLanguageStage


@contextmanager
def refused(planned: str) -> Iterator[None]:
    """Context manager that puts what was planned in front of the message of a ProbeError."""
    try:
        yield
    except ProbeError as error:
        raise ProbeError(f"{planned}. {error}") from error
