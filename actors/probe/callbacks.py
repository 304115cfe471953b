"""Probe of a chain (encoder, user callbacks, projector): complete and cut.

As in :mod:`raymm.actors.probe.cut`, a small copy runs on the CPU, here in the stages that ranks
run. Inputs that callbacks read are found by withholding them: an input that a stage lacks is sent
from then on, and the stages run again, until results and gradients equal those of the complete
chain.

Every stage gets separate copies of the callbacks, as on ranks. Between stages, the complete chain
runs on other values, so that state which copies share (in a Python module) is that of another
microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from raymm.actors.modules.blocks import block_list, hidden_state
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.cut import Passage, prune
from raymm.actors.modules.draws import module_draws
from raymm.actors.modules.message import Message, MicrobatchContext, Read, first_tensor
from raymm.actors.probe.cut import encoder_inputs, ghost_inputs, of_one_that_runs, probe_encoder
from raymm.actors.probe.example_inputs import in_words
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.stage_inputs import fields
from raymm.errors import USER_CODE_RAISES, ProbeError

_TOLERANCE = 1e-4
# Gradients below this, relative to the largest, may be only rounding errors (a key's bias).
_ROUNDING = 1e-3
_CALLBACKS = ("preprocess", "postprocess_module", "postprocess_projector")
_ONE_STAGE = "give it one stage (pp 1)"
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Cuts:
    """Cuts of a chain: between the module's blocks, and before its projector."""

    blocks: bool
    projector: bool

    def __bool__(self) -> bool:
        return self.blocks or self.projector


def probe_chain(
    spec: EncoderSpec, cuts: Cuts, example: Inputs | None = None, read: Read = first_tensor
) -> EncoderSpec:
    """Return the spec with the settings that the stages of a cut chain need.

    Args:
        example: batch entries of the encoder, before its preprocess callback; guessed if None.
        read: selects the part of the module's output that other modules read.

    Raises:
        ProbeError: the encoder cannot be cut; or callbacks reject the example, read values that a
            stage lacks, or give other results when the chain is cut.
    """
    if not cuts:
        return spec
    return of_one_that_runs(spec.source, lambda model: _probe(spec, model, cuts, example, read))


def _probe(
    spec: EncoderSpec, model: nn.Module, cuts: Cuts, example: Inputs | None, read: Read
) -> EncoderSpec:
    example = chain_example(spec, model, example)
    inputs = encoder_inputs(model, module_inputs(spec, example))
    if cuts.blocks:
        cut, travels = _cut(spec, inputs, read)
        spec = replace(spec, cut=cut, travels=travels)
        spec = replace(spec, lost=_lost(spec, model, inputs))
    plain = all(isinstance(value, torch.Tensor) for value in inputs.values())
    if any(getattr(spec, name) for name in _CALLBACKS) or not plain:
        spec = _fitted(spec, model, cuts, example)
    return spec


def check_chain(spec: EncoderSpec, cuts: Cuts, example: Inputs) -> None:
    """Check that a spec from :func:`probe_chain` also fits other inputs, before the callbacks.

    Raises:
        ProbeError: the spec does not fit them.
    """
    if cuts:
        of_one_that_runs(spec.source, lambda model: _check(spec, model, cuts, example))


def _check(spec: EncoderSpec, model: nn.Module, cuts: Cuts, example: Inputs) -> None:
    inputs = encoder_inputs(model, module_inputs(spec, example))
    if cuts.blocks:
        probe_encoder(spec.source, inputs, spec.travels)
        if missing := _lost(spec, model, inputs) - spec.lost:
            spec = replace(spec, lost=spec.lost | missing)
    fitted = _fitted(spec, model, cuts, example)
    if missing := sorted(fitted.travels - spec.travels):
        raise ProbeError(
            f"callbacks of {spec.name!r} read {', '.join(missing)}, which the example inputs did "
            "not contain, so its stages do not send it; add it to example_inputs"
        )


def chain_example(spec: EncoderSpec, model: nn.Module, example: Inputs | None) -> Inputs:
    """Return batch entries for the encoder: the user's example, or guesses.

    Raises:
        ProbeError: no inputs can be guessed.
    """
    if example is not None:
        return {name: value for name, value in example.items() if name != "sample_index"}
    guessed = encoder_inputs(model, None)
    if spec.preprocess is not None:
        try:
            module_inputs(spec, guessed)
        except ProbeError as error:
            raise ProbeError(
                f"{error}. These inputs were guessed from the config of {type(model).__name__}: "
                "give example_inputs as a batch has them for the encoder"
            ) from error
    return guessed


def module_inputs(spec: EncoderSpec, example: Inputs) -> dict[str, Any]:
    """Return the module's inputs for an example, after its preprocess callback.

    Raises:
        ProbeError: the callback fails, or does not return inputs by name.
    """
    inputs: Any = copy.deepcopy(dict(example))
    if spec.preprocess is None:
        return inputs
    try:
        with torch.random.fork_rng(devices=[]):
            preprocess = own_callbacks(spec).preprocess
            assert preprocess is not None
            inputs = preprocess(inputs)
    except USER_CODE_RAISES as error:  # whatever a callback may raise
        raise ProbeError(
            f"preprocess_callback of {spec.name!r} fails on {in_words(example)}{because(error)}; "
            "give example_inputs that it accepts"
        ) from error
    if not isinstance(inputs, Mapping):
        raise ProbeError(
            f"preprocess_callback of {spec.name!r} returns a {type(inputs).__name__} for "
            f"{in_words(example)}; accepted: the encoder's keyword arguments, by name"
        )
    return dict(inputs)


def _cut(spec: EncoderSpec, inputs: Inputs, read: Read) -> tuple[Any, frozenset[str]]:
    """Return the module's cut, and the floating-point inputs that its later stages read."""
    try:
        return probe_encoder(spec.source, inputs, read=read), frozenset()
    except ProbeError as error:
        first_error = error
    travels = frozenset(
        name for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
    try:
        cut = probe_encoder(spec.source, inputs, travels, read)
    except ProbeError:
        raise first_error from None
    for name in sorted(travels):
        try:
            cut = probe_encoder(spec.source, inputs, travels - {name}, read)
            travels -= {name}
        except ProbeError:
            pass
    return cut, travels


def _lost(spec: EncoderSpec, model: nn.Module, inputs: Inputs) -> frozenset[str]:
    """Return the output fields that differ between the last stage and the complete module."""
    assert spec.cut is not None
    total, entered = len(block_list(model, spec.cut.blocks)), {}
    uncut = trial_copy(model)
    for index, block in enumerate(block_list(uncut, spec.cut.blocks)):
        block.register_forward_pre_hook(
            lambda block, args, kwargs, index=index: entered.update(
                {index: hidden_state(block, args, kwargs)}
            ), with_kwargs=True,
        )  # fmt: skip
    lost: set[str] = set()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        expected = fields(uncut(**copy.deepcopy(dict(inputs))))
        for lo in {1, total - 1}:
            stage = prune(trial_copy(model), spec.cut, lo, total)
            torch.default_generator.manual_seed(0)
            # A forward may skip blocks: the stage starts at the first block that is called.
            called = min((index for index in entered if index >= lo), default=None)
            if called is None:
                return frozenset(expected)
            with Passage(stage, spec.cut, lo, total).open(entered[called], spec.name):
                actual = fields(stage(**ghost_inputs(inputs, spec.travels)))
            lost |= {name for name in actual.keys() | expected.keys()
                     if not _same(actual.get(name), expected.get(name))}  # fmt: skip
    return frozenset(lost)


def _same(actual: Any, expected: Any) -> bool:
    (ours, structure), (theirs, their_structure) = tree_flatten(actual), tree_flatten(expected)
    return structure == their_structure and all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _fitted(spec: EncoderSpec, model: nn.Module, cuts: Cuts, example: Inputs) -> EncoderSpec:
    """Return the spec with the inputs that callbacks read added to ``travels``."""
    chain = _Chain(spec, model, example)
    layers = chain.layers(cuts)
    failure: BaseException | None = None
    while True:
        try:
            staged = chain.run(layers)
            break
        except ProbeError as error:
            if error.key is None or error.key in chain.spec.travels:
                raise
            chain.spec = replace(chain.spec, travels=chain.spec.travels | {error.key})
        except USER_CODE_RAISES as error:  # whatever a callback may raise
            failure = error
            break
    try:
        uncut = chain.run((0, chain.spec.num_layers))
    except USER_CODE_RAISES as error:
        raise ProbeError(
            f"callbacks of {spec.name!r} fail on {in_words(example)} and a {type(model).__name__} "
            f"of {chain.spec.num_blocks} blocks, which is used to test the cut{because(error)}; "
            f"give example_inputs that they accept, or {_ONE_STAGE}"
        ) from error
    if failure is not None:
        raise ProbeError(
            f"callbacks of {spec.name!r} fail where it is cut{because(failure)}; what one callback "
            f"stores is not available to another callback in a later stage: {_ONE_STAGE}"
        ) from failure
    if difference := staged.difference(uncut):
        raise ProbeError(
            f"with its callbacks, {spec.name!r} gives other numbers where it is cut "
            f"({difference}): what a callback stores, draws or changes in one stage is not "
            f"available in the next; {_ONE_STAGE}"
        )
    return replace(spec, travels=chain.spec.travels)


@dataclass(frozen=True)
class _Outcome:
    output: torch.Tensor
    gradients: Mapping[str, torch.Tensor]

    def difference(self, other: _Outcome) -> str | None:
        """Return a description of the first difference; None if there is none."""
        if not torch.equal(self.output, other.output):
            return "its output"
        norms = [float(gradient.norm()) for gradient in other.gradients.values()]
        floor = max(norms, default=0.0) * _ROUNDING
        for name, expected in other.gradients.items():
            actual = self.gradients.get(name)
            error = float((expected if actual is None else actual - expected).norm())
            if not error <= _TOLERANCE * max(float(expected.norm()), floor):
                return f"the gradient of {name}"
        return None


class _Chain:
    """Small copy of a chain that can run in stages."""

    def __init__(self, spec: EncoderSpec, model: nn.Module, example: Inputs) -> None:
        blocks = 1 if spec.cut is None else len(block_list(model, spec.cut.blocks))
        self.spec = replace(spec, num_blocks=blocks)
        self._model, self._example = model, dict(example)
        self._projector = None
        if spec.projector is not None:
            self._projector = spec.projector.build().requires_grad_(True).eval()

    def layers(self, cuts: Cuts) -> tuple[int, ...]:
        """Return the bounds of the stages to try, with stages of one block where the plan cuts."""
        blocks, total = self.spec.num_blocks, self.spec.num_layers
        inner = {1, blocks - 1} if cuts.blocks else set()
        return tuple(sorted({0, total} | inner | ({blocks} if cuts.projector else set())))

    def run(self, bounds: Sequence[int]) -> _Outcome:
        """Return output and gradients of the chain in these stages."""
        message, gradients, stages = None, {}, []
        for lo, hi in pairwise(bounds):
            if lo and hi >= self.spec.num_blocks:  # callbacks follow
                self._disturb()
            stage = self._stage(lo, hi)
            stages.append(stage)
            message = self._run(stage, self._example if lo == 0 else None, message)
        assert message is not None  # bounds have at least one stage
        (output,) = message.tensors
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        for name, parameter in (item for stage in stages for item in stage.named_parameters()):
            if parameter.grad is not None:
                total = gradients.get(name)
                gradients[name] = parameter.grad if total is None else total + parameter.grad
        return _Outcome(output.detach(), gradients)

    def _run(self, stage: EncoderStage, inputs: Any, message: Message | None) -> Message:
        received = {} if message is None else {self.spec.name: message}
        with torch.random.fork_rng(devices=[]):
            context = MicrobatchContext(1, draws=module_draws(0, 0, self.spec.name, 0))
            return stage.run(copy.deepcopy(inputs), received, context)

    def _stage(self, lo: int, hi: int) -> EncoderStage:
        spec = own_callbacks(self.spec)
        module = trial_copy(self._model)
        if (lo or hi < spec.num_blocks) and lo < spec.num_blocks:
            assert spec.cut is not None  # a module without cut is one stage
            module = prune(module, spec.cut, lo, min(hi, spec.num_blocks))
        return EncoderStage(spec, lo, hi, module, copy.deepcopy(self._projector))

    def _disturb(self) -> None:
        """Run the complete chain on other values, as another microbatch would."""
        disturbed = {
            name: value.flatten().flip(0).view_as(value) * 0.5
            if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self._example.items()
        }  # fmt: skip
        try:
            with torch.no_grad():
                self._run(self._stage(0, self.spec.num_layers), disturbed, None)
        except USER_CODE_RAISES:  # callbacks may raise anything for meaningless values
            return


def own_callbacks(spec: EncoderSpec) -> EncoderSpec:
    """Return the spec with copies of its callbacks, as ranks get them."""
    callbacks = tuple(getattr(spec, name) for name in _CALLBACKS)
    if not any(callbacks):
        return spec
    from ray import cloudpickle  # imported here because models without callbacks do not need Ray

    # cloudpickle has no __all__ and imports loads from pickle.
    copies = cloudpickle.loads(cloudpickle.dumps(callbacks))  # pyright: ignore[reportPrivateImportUsage]
    return replace(spec, **dict(zip(_CALLBACKS, copies, strict=True)))
