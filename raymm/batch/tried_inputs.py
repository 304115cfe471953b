"""Which inputs of its encoders a model was tried with, before ranks are trusted with them.

Where an encoder is cut or shared out, its later stages have only what a probe found them to need,
so inputs of other names or dtypes than those that were tried may be missing there. The driver looks
at every microbatch's metadata; what is new is tried once, on a shrunk copy in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch

from raymm.actors.probe.experts.own_loss import check_language_loss
from raymm.actors.probe.outputs import check_outputs
from raymm.actors.probe.plain_torch import plain_torch
from raymm.data import MicrobatchMeta
from raymm.errors import DataError, NotRunError, ProbeError
from raymm.model.batch_rules import INDEX
from raymm.model.module_kind import ModuleKind
from raymm.model.multimodal import MultimodalModule

Signature = frozenset[tuple[str, str, int]]
"""Name, dtype and number of dimensions of every input of an encoder."""
Retry = Callable[[Mapping[str, Any]], None]
# Items of a microbatch that an encoder is tried with.
_ITEMS = 2


class TriedInputs:
    """What the encoders of a model have been tried with.

    Args:
        model: its encoders are tried with their example inputs, or with guessed ones.

    Attributes:
        retries: per encoder that is cut or shared out, what raises a ``ProbeError`` if that does
            not do for some inputs.

    Raises:
        ProbeError: an encoder that returns more than would be used.
    """

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model
        self.retries: dict[str, Retry] = {}
        self._tried: dict[str, set[Signature]] = {}
        for name, encoder in model.encoders.items():
            try:
                example = check_outputs(model.encoder_spec(name), encoder.example_inputs)
            except NotRunError:  # the first batch will do
                self._tried[name] = set()
            else:
                self._tried[name] = {_signature_of(example)}

    def check(
        self, parts: Sequence[Mapping[str, Any]], meta: Sequence[MicrobatchMeta]
    ) -> None:
        """Try what has not been tried yet.

        Args:
            parts: per microbatch, each encoder's inputs or a Ray reference to them.
            meta: of the microbatches.

        Raises:
            DataError: inputs that the model as it runs cannot take.
        """
        for part, microbatch in zip(parts, meta, strict=True):
            for name in microbatch.items:
                if name in microbatch.featured:  # its encoder does not see them
                    continue
                signature = _signature(microbatch, name)
                if signature not in self._tried[name]:
                    self._try(name, signature, part[name])

    @plain_torch()
    def _try(self, name: str, signature: Signature, part: Any) -> None:
        example = _example(ray.get(part) if isinstance(part, ray.ObjectRef) else part)
        try:
            try:
                check_outputs(self._model.encoder_spec(name), example)
            except NotRunError:
                if name in self.retries:
                    raise
            if name in self.retries:
                self.retries[name](example)
        except ProbeError as error:
            tried = " or ".join(map(_in_words, self._tried[name])) or "nothing yet"
            raise DataError(
                f"{name!r} has {_in_words(signature)}, which differs from the inputs that its "
                f"encoder was tried with ({tried}), and fails: {error}"
            ) from error
        self._tried[name].add(signature)


def check_loss(model: MultimodalModule) -> None:
    """Check that the language model's loss is the cross entropy that it will be trained with.

    Raises:
        ProbeError: its class computes another loss, and the model's ``router_loss`` does not say
            that it is to be ignored; or its logits depend on earlier forwards. The loss of a
            mixture of experts for its routers is checked by ``model.mixture``.
    """
    mixture = model.mixture
    ignore = model.router_loss == "ignore" or mixture is not None and mixture.loss is not None
    check_language_loss(model.language_model.source(ModuleKind.LANGUAGE_MODEL), ignore)


def _signature(meta: MicrobatchMeta, name: str) -> Signature:
    dtypes = meta.dtypes[name]
    return frozenset(
        (key, dtypes[key], len(shape)) for key, shape in meta.shapes[name].items() if key != INDEX
    )


def _signature_of(inputs: Mapping[str, Any]) -> Signature:
    return frozenset(
        (name, str(value.dtype), value.dim()) for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip


def _in_words(signature: Signature) -> str:
    return ", ".join(
        f"{name} ({dtype.removeprefix('torch.')}, {dims} dimensions)"
        for name, dtype, dims in sorted(signature)
    )


def _example(part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A few items, in full precision: which one a rank computes in is its own affair."""
    tensors = {name: value for name, value in part.items() if name != INDEX}
    items = len(part[INDEX]) if INDEX in part else 0
    if all(len(value) == items for value in tensors.values()):
        tensors = {name: value[:_ITEMS] for name, value in tensors.items()}
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
