"""raymm's attention as an attention implementation of Hugging Face transformers.

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="raymm")
    model(input_ids, raymm_mask=masks)

The mask is a keyword argument (``TransformersKwargs``), which decoders pass down to their layers; a
layer with a sliding window narrows it. Without the argument, attention uses the model's own mask:
causal, padding, or its mask function.

Encoders often do not pass keyword arguments down. If their tokens are split over processes, their
attention modules get an attribute instead (:class:`SharedTokens`).

Both transformers interfaces are registered: with the attention function alone, padding and windows
would be dropped silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from raymm.errors import ModelError
from raymm.kernels.attention import attention
from raymm.kernels.hf.text_masks import tokens_of_all
from raymm.kernels.host_copies import on_host
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.convert import from_dense
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.masked_operator import mask_table, masked_attention

NAME = "raymm"
"""Value of ``attn_implementation``."""
MASK_ARGUMENT = "raymm_mask"
"""Keyword argument of a model's forward: an :class:`AttentionMask`, or one per sequence."""
MODEL_MASK_ARGUMENT = "attention_mask"
"""Keyword argument of a layer's forward: the mask that the model made for itself."""
ATTEND_ARGUMENT = "raymm_attend"
"""Keyword argument of a model's forward: the function that replaces
:func:`raymm.kernels.attention.attention` if tokens are split over processes:
``attend(query, key, value, masks, scale=, softcap=) -> output``."""
_CACHED_MASKS = 64
_SHARED = "_raymm_shared_tokens"
_PREPROCESS = "_preprocess_mask_arguments"
# Arguments that change the scores, with a description; they are not supported.
_UNSUPPORTED = (
    ("s_aux", "attention sinks"),
    ("position_bias", "a position bias"),
    ("head_mask", "a head mask"),
)


def register() -> None:
    """Register ``attn_implementation="raymm"`` with transformers. May be called again."""
    AttentionInterface.register(NAME, raymm_attention_forward)
    AttentionMaskInterface.register(NAME, raymm_model_mask)
    _return_finished_masks()


def _return_finished_masks() -> None:
    """Make transformers return a :class:`ModelMask` unchanged, as it does with 4-d masks. Some
    models pass the finished mask to their text model, which processes it again (PaliGemma)."""
    preprocess = getattr(masking_utils, _PREPROCESS, None)  # private to transformers
    if preprocess is None or hasattr(preprocess, "__wrapped__"):
        return
    names = inspect.signature(preprocess)

    @wraps(preprocess)
    def preprocess_mask_arguments(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        mask = names.bind(*args, **kwargs).arguments["attention_mask"]
        if isinstance(mask, ModelMask):
            return True, mask, None, None, None, None, None
        return preprocess(*args, **kwargs)

    setattr(masking_utils, _PREPROCESS, preprocess_mask_arguments)


def can_use(model: nn.Module) -> bool:
    """Return True if a transformers model takes its attention from the interface."""
    return bool(getattr(model, "_can_set_attn_implementation", lambda: False)())


_NO_VALUES = (
    f"a layer reads the values of its attention mask; {NAME} attention does not support this, "
    "because its masks are tables of segments, not tensors"
)


@dataclass(frozen=True)
class ModelMask:
    """The mask that a model made for itself, built when a layer first needs it. Any other use as a
    tensor raises :class:`ModelError`.

    Attributes:
        build: returns the masks, one per sequence or one for all.
        window: the window of a plain sliding-window layer; a ``raymm_mask`` is narrowed by it.
    """

    build: Callable[[], tuple[AttentionMask, ...]]
    window: int | None = None

    @cached_property
    def masks(self) -> tuple[AttentionMask, ...]:
        """Masks, one per sequence or one for all."""
        return self.build()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a Python protocol that the class lacks
            raise AttributeError(name)
        raise ModelError(_NO_VALUES)

    def __getitem__(self, index: Any) -> Any:
        raise ModelError(_NO_VALUES)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(_NO_VALUES)


class SharedTokens:
    """State of attention whose tokens are split over processes, for models that pass no keyword
    arguments to their layers.

    Attributes:
        attend: as :data:`ATTEND_ARGUMENT`; None while no tokens are split.
        length: tokens of all processes together, for attention without a mask.
    """

    def __init__(self) -> None:
        self.attend: Callable[..., torch.Tensor] | None = None
        self.length = 0
        self._dense: list[tuple[torch.Tensor, tuple[AttentionMask, ...]]] = []

    def start(self, attend: Callable[..., torch.Tensor], length: int) -> None:
        """Compute attention by ``attend`` from now on."""
        self.attend, self.length = attend, length

    def stop(self) -> None:
        """Compute attention locally again."""
        self.attend, self.length = None, 0
        self._dense.clear()

    def attach(self, module: nn.Module) -> None:
        """Attach this state to all modules in ``module``. Other modules see complete tensors."""
        for child in module.modules():
            setattr(child, _SHARED, self)

    def masks_from(self, dense: torch.Tensor) -> tuple[AttentionMask, ...]:
        """Return masks for a dense mask, cached because all layers of a forward share it."""
        for earlier, masks in self._dense:
            if earlier is dense:
                return masks
        self._dense.append((dense, _from_dense(dense)))
        return self._dense[-1][1]


def raymm_model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> ModelMask:
    """Create a model's mask; implements transformers' mask interface, like ``sdpa_mask``.

    Causal, windowed and bidirectional masks are built from segments. Other masks (padding, packed
    sequences, custom mask functions) are built densely, O(Tq * Tk), unless a ``raymm_mask``
    replaces them. ``attention_mask`` is (B, Tk) bool, False for padding.

    Raises:
        ModelError: rows are packed, and the model uses a custom mask function.
    """
    window = _sliding_window(mask_function)
    if (tokens := tokens_of_all()) is not None:
        batch_size, attention_mask = tokens.rows, tokens.padding
        q_length = kv_length = tokens.length
        if tokens.documents is not None:
            if mask_function is not causal_mask_function and window is None:
                raise ModelError(
                    "cannot pack rows for this model, because it uses a custom mask function; "
                    "accepted: a causal mask, or a plain sliding window"
                )
            packed = tokens
            return ModelMask(lambda: (packed.packed_mask(window),), window)
    padded = attention_mask is not None and not bool(on_host(attention_mask).all())
    if not padded and q_offset == kv_offset == 0:
        if mask_function is bidirectional_mask_function:
            return ModelMask(lambda: (_plain(q_length, kv_length, False, None),))
        if mask_function is causal_mask_function or window is not None:
            return ModelMask(lambda: (_plain(q_length, kv_length, True, window),), window)
    arguments = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def build() -> tuple[AttentionMask, ...]:
        dense = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **arguments,
        )  # fmt: skip
        assert dense is not None  # it is None only with the two skips
        return _from_dense(dense)

    return ModelMask(build, window)


def traceable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's keyword arguments with its masks as a table, for ``torch.compile``, which
    cannot trace mask objects."""
    mask, model_mask = arguments.get(MASK_ARGUMENT), arguments.get(MODEL_MASK_ARGUMENT)
    built = model_mask if isinstance(model_mask, ModelMask) else None
    if mask is not None:
        masks = _as_tuple(mask)
        if built is not None and built.window is not None:
            masks = tuple(windowed(each, built.window) for each in masks)
    elif built is not None:
        masks = built.masks
    else:
        return dict(arguments)
    replaced = {} if built is None else {MODEL_MASK_ARGUMENT: None}
    return {**arguments, **replaced, MASK_ARGUMENT: mask_table(masks)}


def raymm_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: ModelMask | torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention; implements transformers' interface, like ``sdpa_attention_forward``.

    Args:
        query: (B, Hq, Tq, D).
        key, value: (B, Hk, Tk, D), not repeated for query heads.
        attention_mask: the model's mask, of the tokens of all processes; ignored if there is a
            ``raymm_mask``.
        options: rejected if they change the scores, except

            - ``scaling``: factor of the scores; default ``D ** -0.5``.
            - ``softcap``: scores become ``softcap * tanh(scores / softcap)``.
            - ``sliding_window``: most tokens that a row sees.
            - ``is_causal``: used if there is no mask.
            - ``raymm_mask``: replaces the model's mask; a table (:func:`traceable`) in compiled
              blocks.
            - ``raymm_attend``: replaces the attention function, for tokens split over processes.

    Returns:
        (B, Tq, Hq, D), and None in place of attention weights.

    Raises:
        ModelError: the mask does not fit, or the attention needs more than a mask.
    """
    _check_supported(type(module).__name__, options)
    table = options.get(MASK_ARGUMENT)
    if isinstance(table, torch.Tensor):
        _check_chunks(module)
        return masked_attention(
            query, key, value, table, window=options.get("sliding_window"),
            scale=options.get("scaling"), softcap=options.get("softcap"),
        ), None
    attend: Any = _attend  # the type of a function that is not compiled is unknown
    return attend(module, query, key, value, attention_mask, **options)


# Not compiled: masks are not tensors, and the choice of kernels depends on them.
@torch.compiler.disable
def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: ModelMask | torch.Tensor | None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute :func:`raymm_attention_forward` for masks that are objects."""
    raymm_mask, raymm_attend = options.get(MASK_ARGUMENT), options.get(ATTEND_ARGUMENT)
    window, is_causal = options.get("sliding_window"), options.get("is_causal")
    factors = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
    shared: SharedTokens | None = getattr(module, _SHARED, None)
    if shared is not None and (shared.attend is None or raymm_attend is not None):
        shared = None
    if shared is not None:
        raymm_attend = shared.attend
    if raymm_mask is not None:
        masks = _explicit_masks(module, raymm_mask, attention_mask, window)
    elif attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        lengths = query.shape[2], key.shape[2]
        if shared is not None:
            lengths = shared.length, shared.length
        masks = (_plain(*lengths, bool(is_causal), window),)
    elif isinstance(attention_mask, ModelMask):
        masks = attention_mask.masks
    elif shared is not None:
        masks = shared.masks_from(attention_mask)
    else:
        masks = _from_dense(attention_mask)
    if raymm_attend is not None:
        out = raymm_attend(query, key, value, masks, **factors)
    else:
        out = attention(query, key, value, masks, **factors, lse=False)[0]
    return out.transpose(1, 2).contiguous(), None


def _check_supported(layer: str, arguments: Mapping[str, Any]) -> None:
    """Reject arguments that change the scores and cannot be expressed as a mask."""
    for name, feature in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ModelError(f"{layer} has {feature}, which {NAME} attention does not support")
    if dropout := arguments.get("dropout"):
        raise ModelError(
            f"{layer} has attention dropout {dropout}, which {NAME} attention does not "
            "support; set attention_dropout to 0 in the model's config"
        )


def _explicit_masks(
    module: nn.Module,
    raymm_mask: AttentionMask | Sequence[AttentionMask],
    attention_mask: ModelMask | torch.Tensor | None,
    window: int | None,
) -> tuple[AttentionMask, ...]:
    """Return a layer's ``raymm_mask``, narrowed by its window or that of the model's mask."""
    _check_chunks(module)
    masks = _as_tuple(raymm_mask)
    if window is None and isinstance(attention_mask, ModelMask):
        window = attention_mask.window
    return masks if window is None else tuple(windowed(mask, window) for mask in masks)


def _check_chunks(module: nn.Module) -> None:
    """Reject a layer that attends in chunks, which a mask given to it would override."""
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk is not None:
        raise ModelError(
            f"{type(module).__name__} attends in chunks of {chunk} tokens, and {MASK_ARGUMENT} "
            "would override them; add the chunks to the mask and set attention_chunk_size to None"
        )


def _as_tuple(masks: AttentionMask | Sequence[AttentionMask]) -> tuple[AttentionMask, ...]:
    return (masks,) if isinstance(masks, AttentionMask) else tuple(masks)


@lru_cache(maxsize=_CACHED_MASKS)
def windowed(mask: AttentionMask, window: int) -> AttentionMask:
    """Return ``mask.windowed(window)``, cached so that all layers share one object and plan."""
    return mask.windowed(window)


@lru_cache(maxsize=_CACHED_MASKS)
def _plain(
    n_queries: int, n_keys: int, is_causal: bool, window: int | None
) -> AttentionMask:
    if not is_causal:
        if window is not None:
            raise ModelError(f"a sliding window ({window}) requires causal attention")
        return mask_patterns.full(n_queries, n_keys)
    if n_queries != n_keys:
        raise ModelError(
            f"causal attention has {n_queries} queries and {n_keys} keys; {NAME} attention is for "
            "training and does not support a KV cache, set use_cache=False"
        )
    return mask_patterns.causal(n_queries, window)


def _from_dense(mask: torch.Tensor) -> tuple[AttentionMask, ...]:
    """Convert a (B or 1, 1, Tq, Tk) mask: bool, or 0 where visible and very negative elsewhere."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ModelError(
            f"attention_mask must be (B, 1, Tq, Tk), one for all heads, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        visible = mask == 0
        if bool((~visible & (mask > -1e4)).any()):
            raise ModelError(
                "attention_mask adds a bias to scores; accepted: bool, or 0 and values below -1e4"
            )
        mask = visible
    return tuple(from_dense(visible_to) for visible_to in mask[:, 0])


_SLIDING = sliding_window_causal_mask_function(2)


def _closed_over(function: Callable) -> Any:
    """Return the value of the first variable of a closure."""
    closure = getattr(function, "__closure__", None)
    assert closure is not None
    return closure[0].cell_contents


def _sliding_window(mask_function: Callable) -> int | None:
    """Return the window if this is transformers' plain sliding window, recognized by its code
    object. Other functions return None and are evaluated densely."""
    if getattr(mask_function, "__code__", None) is not _SLIDING.__code__:
        return None
    functions, expected = _closed_over(mask_function), _closed_over(_SLIDING)
    if [getattr(function, "__code__", None) for function in functions] != [
        original.__code__ for original in expected
    ]:
        return None
    cells = [cell.cell_contents for function in functions for cell in function.__closure__ or ()]
    return cells[0] if len(cells) == 1 and isinstance(cells[0], int) else None
