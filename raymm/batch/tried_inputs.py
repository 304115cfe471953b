"""Check that encoder inputs have the names and dtypes with which a model was tried.

The later stages of a split or sharded encoder only receive the values that a probe found necessary,
so inputs with other names or dtypes may be missing there. The driver compares the metadata of every
microbatch; a new combination is tried once, on a small replica in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch

from raymm.actors.probe.outputs import check_outputs
from raymm.actors.probe.plain_torch import plain_torch
from raymm.data import MicrobatchMeta
from raymm.errors import DataError, NotRunError, ProbeError
from raymm.model.batch_rules import INDEX
from raymm.model.multimodal import MultimodalModule

Signature = frozenset[tuple[str, str, int]]
"""Name, dtype and number of dimensions of every input of an encoder."""
Retry = Callable[[Mapping[str, Any]], None]
# Number of items of a microbatch in a trial of an encoder.
_ITEMS = 2


class TriedInputs:
    """Input signatures with which the encoders of a model have been tried.

    Encoders are first tried with their example inputs, or with guessed ones.

    Attributes:
        retries: for each split or sharded encoder, a function that raises a ``ProbeError`` if its
            stages do not work for some inputs.

    Raises:
        ProbeError: an encoder returns more than would be used.
    """

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model
        self.retries: dict[str, Retry] = {}
        self._tried: dict[str, set[Signature]] = {}
        for name, encoder in model.encoders.items():
            try:
                example = check_outputs(model.encoder_spec(name), encoder.example_inputs)
            except NotRunError:  # the first batch is tried instead
                self._tried[name] = set()
            else:
                self._tried[name] = {_signature_of(example)}

    def check(
        self, parts: Sequence[Mapping[str, Any]], meta: Sequence[MicrobatchMeta]
    ) -> None:
        """Try new input signatures; raise a ``DataError`` for inputs that the model cannot accept
        as it is split.

        Args:
            parts: inputs of each encoder by microbatch, or a Ray reference to them.
        """
        for inputs, microbatch in zip(parts, meta, strict=True):
            for name in microbatch.items:
                if name in microbatch.featured:  # cached features replace the encoder
                    continue
                signature = _signature(microbatch, name)
                if signature not in self._tried[name]:
                    self._try(name, signature, inputs[name])

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
    """Return a few items in full precision; the precision of the ranks does not matter here."""
    tensors = {name: value for name, value in part.items() if name != INDEX}
    items = len(part[INDEX]) if INDEX in part else 0
    if all(len(value) == items for value in tensors.values()):
        tensors = {name: value[:_ITEMS] for name, value in tensors.items()}
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
