"""Trial of items on an encoder in this process, before they are sent to a rank.

Only the forward of an encoder determines its accepted input. So the first items of every new
signature (keyword arguments, dtypes, shapes) run through a skeleton on the meta device, without
weights, memory or values. If that fails, perhaps because the forward reads values, a shallow
replica with random weights runs on the items themselves and decides.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from raymm.actors.features.kept_features import FEATURES
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.example_inputs import example_inputs, in_words
from raymm.actors.probe.small_model import shrink_config, small_model
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import on_meta
from raymm.errors import USER_CODE_RAISES, DataError, ModelError
from raymm.model.batch_rules import INDEX, check_range, said

Items = Mapping[str, torch.Tensor]

# Number of cached signatures; images of natural sizes have many.
MAX_SIGNATURES = 4096


@dataclass(frozen=True)
class Taken:
    """Result of a trial for items of one signature.

    Attributes:
        tokens: tokens of the features of an item; None if the encoder could not be tried.
        ids: size of the embedding table that a keyword argument indexes, by keyword.
    """

    tokens: int | None = None
    ids: Mapping[str, int] = field(default_factory=dict)


class EncoderTrial:
    """Tries items on one encoder with its projector and callbacks, once per signature.

    Args:
        width: width of the language model's embeddings; None if unknown.
        autocast: dtype of the ranks' autocast; None without.
        example: example keyword arguments for errors, where the config does not provide them.
    """

    def __init__(
        self, spec: EncoderSpec, width: int | None, autocast: str | None = None,
        example: Items | None = None,
    ) -> None:
        self._spec, self._width = spec, width
        self._autocast, self._example = autocast, example
        self._by_signature: OrderedDict[tuple, Taken] = OrderedDict()
        self._has_callbacks = any(
            (spec.preprocess, spec.postprocess_module, spec.postprocess_projector)
        )
        self._skeleton: EncoderStage | None = None
        self._small: EncoderStage | None = None
        self._ran = False  # True if the module of the last trial ran to its end

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes: results, without modules and their weights."""
        spec = replace(self._spec, source=self._spec.source.for_names(()))
        return {**vars(self), "_spec": spec, "_skeleton": None, "_small": None}

    def try_example(self) -> None:
        """Try the example and cache the result."""
        example = {k: v for k, v in (self._example or {}).items() if isinstance(v, torch.Tensor)}
        if example and len({len(value) for value in example.values() if value.dim()}) == 1:
            count = len(next(iter(example.values())))
            with suppress(DataError):  # items like these are refused when a batch has them
                self.taken({**example, INDEX: torch.arange(count)})

    def taken(self, items: Items) -> Taken:
        """Try an encoder's tensors and ``sample_index`` (see
        :func:`raymm.model.batch_rules.complete_microbatch`), or return the cached result.

        Raises:
            DataError: the encoder, its callbacks or its projector do not accept the items, do not
                read one of them, or do not return (items, tokens, width).
        """
        tensors = {key: value for key, value in items.items() if key != INDEX}
        count = len(items[INDEX])
        key = signature(tensors, count)
        if self._has_callbacks:  # callbacks may change the number of items
            key = (count, *key)
        taken = self._by_signature.get(key)
        if taken is None:
            taken = self._by_signature[key] = self._try(tensors, count)
            if len(self._by_signature) > MAX_SIGNATURES:
                self._by_signature.popitem(last=False)
        for name, stop in taken.ids.items():
            field_name = f"{name!r} of {self._spec.name!r}"
            check_range(field_name, tensors[name], stop, f"0 to {stop - 1}, the encoder's ids")
        return taken

    def _try(self, tensors: Items, count: int) -> Taken:
        if FEATURES in tensors:
            return self._of_features(tensors)
        try:
            if self._skeleton is None:
                self._skeleton = skeleton_chain(self._spec)
            outcome = self._run(self._skeleton, {k: v.to("meta") for k, v in tensors.items()})
        except USER_CODE_RAISES:  # not every forward runs without data
            try:
                if self._small is None:
                    self._small = _small_chain(self._spec)
            except USER_CODE_RAISES:  # there is nothing to try the items on; ranks check them
                return Taken()
            try:
                autocast = self._autocast and getattr(torch, self._autocast)
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    outcome = self._run(self._small, {k: v.clone() for k, v in tensors.items()})
            except USER_CODE_RAISES as error:
                if self._ran and self._spec.postprocess_module is not None:
                    return Taken()  # a callback may need a block that the replica does not have
                raise DataError(self._refusal(tensors, error)) from error
        features, unread, ids = outcome
        if unread:
            raise DataError(
                f"{unread[0]!r} of {self._spec.name!r} ({said(tensors[unread[0]])}) is not read by "
                "the encoder or its callbacks; accepted: keyword arguments that they read"
            )
        expected = (count, "tokens", *([self._width] if self._width else ["width"]))
        shape = tuple(features.shape)
        if len(shape) != 3 or shape[0] != count or self._width not in (None, shape[2]):
            raise DataError(
                f"{self._spec.name!r} returns features of shape {shape} for {count} items, "
                f"{in_words(tensors)}; accepted: items for which it returns "
                f"{expected}".replace("'", "")
            )
        return Taken(shape[1], ids)

    def _of_features(self, features: Items) -> Taken:
        """Return the result for cached features of the encoder or its first blocks."""
        if self._skeleton is None:
            self._skeleton = skeleton_chain(self._spec)
        with torch.no_grad():
            items = {name: entry.to("meta") for name, entry in features.items()}
            items[FEATURES] = items[FEATURES].float()
            message = self._skeleton.run(items, {}, MicrobatchContext(1))
        return Taken(message.tensors[0].shape[1])

    def _run(
        self, chain: EncoderStage, tensors: Items
    ) -> tuple[torch.Tensor, list[str], dict[str, int]]:
        """Return the features, the unread inputs, and the table sizes of inputs that are ids."""
        reads = _Reads(tensors)
        self._ran = False
        module = _whole(chain)
        hook = module.register_forward_hook(self._note_end)
        with (
            reads.followed(chain), lookups(module, tensors) as ids,
            torch.random.fork_rng(devices=[]), torch.no_grad(), hook,
        ):
            message = chain.run(dict(tensors), {}, MicrobatchContext(1))
        return message.tensors[0], reads.unread, ids

    def _note_end(self, *_: Any) -> None:
        self._ran = True

    def _refusal(self, tensors: Items, error: BaseException) -> str:
        example = self._example
        if example is None:
            try:
                assert self._small is not None  # which raised the error
                example = example_inputs(_whole(self._small))
            except ModelError:
                pass
        accepted = "" if example is None else f"; accepted: for example {in_words(example)}"
        return f"encoder {self._spec.name!r} does not take {in_words(tensors)}{because(error)}" + (
            accepted
        )


def signature(tensors: Items, count: int) -> tuple:
    """Return the properties of items, apart from values, that decide whether an encoder accepts
    them. The number of items does not count if all tensors have them along the first dimension."""
    return tuple(
        (key, value.dtype, len(value) == count, tuple(value.shape)[len(value) == count :])
        for key, value in sorted(tensors.items())
    )


def skeleton_chain(spec: EncoderSpec) -> EncoderStage:
    """Return the whole encoder with projector and callbacks on the meta device."""
    module = on_meta(spec.source.skeleton()).to("meta")
    projector = spec.projector and on_meta(spec.projector.skeleton()).to("meta")
    return EncoderStage(spec, 0, spec.num_layers, module, projector)


def _small_chain(spec: EncoderSpec) -> EncoderStage:
    """Return the encoder on the CPU, with few blocks, random weights and all ids."""
    skeleton = spec.source.skeleton()
    if isinstance(skeleton, PreTrainedModel):
        config = shrink_config(skeleton.config)
        for name, value in vars(skeleton.config).items():
            if name == "vocab_size" or name.endswith("_token_id"):
                setattr(config, name, copy.copy(value))
        with torch.random.fork_rng(devices=[]):
            module: nn.Module = type(skeleton)._from_config(config, dtype=torch.float32)
        module.train(skeleton.training)
    else:
        module = small_model(spec.source).train(skeleton.training)
    projector = spec.projector and spec.projector.build()
    return EncoderStage(spec, 0, spec.num_layers, module, projector)


class _Reads(TorchFunctionMode):
    """Records which tensors a chain's module and callbacks read."""

    def __init__(self, tensors: Items) -> None:
        super().__init__()
        self._keys = {_storage(value): key for key, value in tensors.items()}
        self._left = set(tensors)
        self._inside = 0

    @property
    def unread(self) -> list[str]:
        return sorted(self._left)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._inside and self._left:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._left.discard(self._keys.get(_storage(leaf)))
        return function(*args, **(kwargs or {}))

    @contextmanager
    def followed(self, chain: EncoderStage) -> Iterator[None]:
        """Record reads while a chain runs, except those of the chain's code, which only sorts its
        inputs."""
        module = _whole(chain)
        with (
            chain.callbacks_wrapped(self._within),
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True), self,
        ):
            yield

    def _within(self, callback: Callable | None) -> Callable | None:
        if callback is None:
            return None

        def run(*args: Any) -> Any:
            self._inside += 1
            try:
                return callback(*args)
            finally:
                self._inside -= 1

        return run

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _leave(self, *_: Any) -> None:
        self._inside -= 1


@contextmanager
def lookups(module: nn.Module, tensors: Items) -> Iterator[dict[str, int]]:
    """Record which tensors a module looks up in embedding tables, with the size of the smallest
    table."""
    keys = {_storage(value): key for key, value in tensors.items()}
    sizes: dict[str, int] = {}

    def look_up(table: nn.Embedding, args: tuple) -> None:
        key = keys.get(_storage(args[0])) if args else None
        if key is not None:
            sizes[key] = min(table.num_embeddings, sizes.get(key, table.num_embeddings))

    handles = [
        embedding.register_forward_pre_hook(look_up)
        for embedding in module.modules() if isinstance(embedding, nn.Embedding)
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _storage(tensor: torch.Tensor) -> int:
    """Return a key that a tensor shares with its views, on the meta device too."""
    return tensor.untyped_storage()._cdata


def _whole(chain: EncoderStage) -> nn.Module:
    assert chain.module is not None
    return chain.module
