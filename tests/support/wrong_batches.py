"""A small model with two encoders, a good batch, invalid batches, and random changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from raymm.actors.modules.merge import ReplaceTokens
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from tests.support import parity_models as pm

IMAGE_TOKENS, SOUND_TOKENS = 4, pm.AUDIO_FRAMES // 2
POSITIONS = 64  # of the language model


def reading_scale(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scale by an additional argument of the callback, which not every batch has."""
    scale = inputs.pop("scale", None)
    if scale is not None:
        inputs["pixel_values"] = inputs["pixel_values"] * scale.view(-1, 1, 1, 1)
    return inputs


def small_model(merge: Any = None) -> MultimodalModule:
    return MultimodalModule(
        {
            "vision": ModalityModule(
                pm.build(pm.siglip(), 1), "linear", preprocess_callback=reading_scale
            ),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear", frozen=True),
        },
        ModalityModule(pm.build(pm.gpt2(), 3)),
        merge,
    )


def replacing() -> ReplaceTokens:
    return ReplaceTokens({"vision": pm.IMAGE_TOKEN, "audio": pm.AUDIO_TOKEN})


def good_batch(seed: int = 3) -> dict[str, Any]:
    """Return four rows: with an image; with two; with none; with one and audio."""
    image, sound = (pm.IMAGE_TOKEN, IMAGE_TOKENS), (pm.AUDIO_TOKEN, SOUND_TOKENS)
    runs = [[image], [image, image], [], [image, sound]]
    return pm.batch([7, 5, 9, 6], seed, runs, vision=[0, 1, 1, 3], audio=[3])


def _with(**changes: Any) -> dict[str, Any]:
    """Return the good batch with some keys changed, by a function of the value or to a value."""
    batch = good_batch()
    for name, change in changes.items():
        batch[name] = change(batch.get(name)) if callable(change) else change
    return batch


def _vision(**changes: Any) -> dict[str, Any]:
    value = good_batch()["vision"]
    for name, change in changes.items():
        value[name] = change(value.get(name)) if callable(change) else change
    return _with(vision={k: v for k, v in value.items() if v is not None})


def _put(row: int, place: int, value: int):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[row, place] = value
        return tensor

    return change


def _without(name: str) -> dict[str, Any]:
    batch = good_batch()
    del batch[name]
    return batch


def _longest_row(tokens: int) -> dict[str, Any]:
    return pm.batch([tokens, 5, 5, 5], 3)


ROWS, T = good_batch()["input_ids"].shape

# Per case: the batch, and required parts of the error.
WRONG: dict[str, tuple[Any, list[str]]] = {
    "int32 labels": (
        _with(labels=lambda v: v.int()), ["labels", "int32", f"({ROWS}, {T})", "int64"]
    ),
    "int32 ids": (_with(input_ids=lambda v: v.int()), ["input_ids", "int32", "int64"]),
    "float ids": (_with(input_ids=lambda v: v.float()), ["input_ids", "float32", "int64"]),
    "ids of one row": (_with(input_ids=lambda v: v[0]), ["input_ids", f"({T},)", "(rows, tokens)"]),
    "short labels": (_with(labels=lambda v: v[:, :5]), ["labels", "(4, 5)", f"({ROWS}, {T})"]),
    "labels of fewer rows": (_with(labels=lambda v: v[:2]), ["labels", f"(2, {T})"]),
    "short mask": (_with(attention_mask=lambda v: v[:, :5]), ["attention_mask", "(4, 5)"]),
    "mask of fewer rows": (_with(attention_mask=lambda v: v[:2]), ["attention_mask", f"(2, {T})"]),
    "float mask": (_with(attention_mask=lambda v: v.float()), ["attention_mask", "float32"]),
    "mask of twos": (
        _with(attention_mask=lambda v: v * 2), ["attention_mask[0, 0] is 2", "1 for a token"]
    ),
    "a row of padding": (
        _with(attention_mask=lambda v: v * torch.tensor([[1], [0], [1], [1]])),
        ["attention_mask[1] has no 1", "at least one token"],
    ),
    "a mask with holes": (
        _with(attention_mask=_put(0, 1, 0), labels=torch.full((ROWS, T), -100)),
        ["attention_mask[0] has 2 runs of 1", "before or after"],
    ),
    "labels of padding": (
        _with(labels=_put(0, T - 1, 5)), [f"labels[0, {T - 1}] is 5", "attention_mask is 0", "-100"]
    ),
    "ids beyond the vocabulary": (
        _with(input_ids=_put(2, 1, pm.V)), ["input_ids[2, 1] is 97", "0 to 96", "vocabulary"]
    ),
    "negative ids": (_with(input_ids=_put(2, 1, -1)), ["input_ids[2, 1] is -1", "0 to 96"]),
    "labels beyond the vocabulary": (
        _with(labels=_put(2, 4, 2**62)), [f"labels[2, 4] is {2**62}", "0 to 96", "-100"]
    ),
    "negative labels": (_with(labels=_put(2, 4, -1)), ["labels[2, 4] is -1", "0 to 96", "-100"]),
    "no labels": (_without("labels"), ["labels is missing", "int64"]),
    "labels that are None": (_with(labels=None), ["labels is missing"]),
    "no ids": (_without("input_ids"), ["input_ids is missing"]),
    "nothing to predict": (
        _with(labels=lambda v: torch.full_like(v, -100)), ["labels of the step", "-100"]
    ),
    "only first tokens to predict": (
        _with(labels=lambda v: torch.full_like(v, -100).index_fill(1, torch.tensor([0]), 5)),
        ["labels of the step", "-100"],
    ),
    "zero rows": (
        {"input_ids": torch.zeros(0, 5).long(), "labels": torch.zeros(0, 5).long()},
        ["input_ids", "(0, 5)", "at least one row"],
    ),
    "no text": (
        {"input_ids": torch.zeros(4, 0).long(), "labels": torch.zeros(4, 0).long()},
        ["input_ids", "(4, 0)", "one token"],
    ),
    "rows that do not divide": (
        pm.batch([5, 5, 5], 3), ["3 rows", "num_microbatches=2"]
    ),
    "an unknown argument": (
        _with(position_ids=torch.zeros(4, T)), ["'position_ids'", "input_ids, labels", "audio"]
    ),
    "an unknown modality": (_with(video={"x": torch.ones(4)}), ["'video'", "vision, audio"]),
    "numpy ids": (
        _with(input_ids=lambda v: v.numpy()), ["input_ids", "ndarray", "an int64 tensor"]
    ),
    "numpy pixels": (
        _vision(pixel_values=lambda v: v.numpy()), ["'pixel_values' of 'vision'", "ndarray"]
    ),
    "a list of ids": (_with(input_ids=lambda v: v.tolist()), ["input_ids is a list of 4"]),
    "a modality that is a tensor": (
        _with(vision=pm.images(4)["pixel_values"]), ["'vision'", "(4, 3, 16, 16)", "a dict"]
    ),
    "a modality that is a list": (_with(vision=[1, 2]), ["'vision' is a list of 2", "a dict"]),
    "a modality that is empty": (_with(vision={}), ["'vision' has no tensor", "None"]),
    "a modality with rows alone": (
        _with(vision={"sample_index": torch.tensor([0])}), ["'vision' has no tensor"]
    ),
    "a modality without items": (
        _with(vision=pm.images(0)), ["'pixel_values' of 'vision'", "(0, 3, 16, 16)", "at least one"]
    ),
    "a scalar more": (_vision(scale=2.0), ["'scale' of 'vision' is 2.0", "a tensor"]),
    "a tensor without items": (
        _vision(scale=torch.tensor(2.0)), ["'scale' of 'vision'", "shape ()", "first dimension"]
    ),
    "an argument that nothing reads": (
        _vision(sizes=torch.ones(4)), ["'sizes' of 'vision'", "not read by"]
    ),
    "an argument that a callback cannot use": (
        _vision(scale=torch.ones(4, 3)), ["encoder 'vision' does not take", "scale (3, 3) float32"]
    ),
    "another argument": (
        _with(vision=pm.sounds(4)), ["encoder 'vision' does not take input_features"]
    ),
    "images of another size": (
        _vision(pixel_values=torch.zeros(4, 3, 32, 32)),
        ["encoder 'vision' does not take", "pixel_values (3, 3, 32, 32) float32",
         "accepted: for example pixel_values (1, 3, 16, 16) float32"],
    ),
    "images of one channel": (
        _vision(pixel_values=lambda v: v[:, :1]), ["'vision'", "(3, 1, 16, 16)", "3 channels"]
    ),
    "images of no channel": (_vision(pixel_values=lambda v: v[:, 0]), ["'vision'", "(3, 16, 16)"]),
    "a short sound": (
        _with(audio=lambda v: {**v, "input_features": v["input_features"][..., :10]}),
        ["microbatch 1", "'audio'", "input_features (1, 8, 10) float32", "24"],
    ),
    "more images than rows": (
        _with(vision=pm.images(6)), ["'vision'", "'pixel_values': 6", "4 rows", "'sample_index'"]
    ),
    "fewer images than rows": (_with(vision=pm.images(3)), ["'pixel_values': 3", "4 rows"]),
    "an image of row -1": (
        _vision(sample_index=torch.tensor([0, 1, -1, 3])),
        ["'sample_index' of 'vision'[2] is -1", "0 to 3"],
    ),
    "an image of no row": (
        _vision(sample_index=torch.tensor([0, 1, 1, 4])), ["'vision'[3] is 4", "0 to 3"]
    ),
    "rows of too few images": (
        _vision(sample_index=torch.tensor([0, 1, 1])), ["'sample_index' of 'vision'", "(3,)"]
    ),
    "rows that are floats": (
        _vision(sample_index=lambda v: v.float()), ["'sample_index' of 'vision'", "float32"]
    ),
    "rows that are a list": (
        _vision(sample_index=[0, 1, 1, 3]), ["'sample_index' of 'vision' is a list of 4", "int64"]
    ),
    "sparse pixels": (_vision(pixel_values=lambda v: v.to_sparse()), ["sparse_coo", "dense"]),
    "complex pixels": (_vision(pixel_values=lambda v: v + 1j), ["complex64", "real numbers"]),
    "quantised pixels": (
        _vision(pixel_values=lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8)),
        ["'pixel_values'", "quantised", "dense"],
    ),
    "pixels that want a gradient": (
        _vision(pixel_values=lambda v: v.clone().requires_grad_()), ["requires_grad", "detach"]
    ),
    "pixels on no device": (_vision(pixel_values=lambda v: v.to("meta")), ["meta", "real numbers"]),
    "a text that is too long": (
        _longest_row(POSITIONS + 1), ["65 tokens", "up to 64", "max_position_embeddings"]
    ),
    "no batch": (None, ["the batch is missing", "a dict, or a list"]),
    "a string": ("batch", ["the batch is 'batch'"]),
    "a number": (3, ["the batch is 3"]),
    "an empty list": ([], ["a list of 0"]),
    "an empty dict": ({}, ["input_ids is missing"]),
    "a microbatch that is none": (
        [good_batch(), [1]], ["microbatch 1", "a list of 1", "accepted: a dict"]
    ),
    "a wrong microbatch": (
        [good_batch(), _with(labels=lambda v: v.int())], ["microbatch 1: labels", "int32"]
    ),
}

# Cases with placeholders for items.
WRONG_PLACES: dict[str, tuple[Any, list[str]]] = {
    "a placeholder too few": (
        _with(input_ids=_put(0, 1, 5)), ["3 placeholder tokens", "'vision'", "4 features"]
    ),
    "placeholders without items": (_with(vision=None), ["4 placeholder tokens", "0 features"]),
    "items without placeholders": (
        _with(input_ids=lambda v: v.clamp(max=90)), ["0 placeholder tokens", "4 features"]
    ),
    "items of another row": (
        _vision(sample_index=torch.tensor([0, 1, 2, 3])), ["'vision'", "must be equal"]
    ),
    "placeholders to predict": (
        _with(labels=_put(0, 1, pm.IMAGE_TOKEN)), ["labels[0, 1] is 95", "placeholder", "-100"]
    ),
}


def equal_numbers() -> dict[str, dict[str, Any]]:
    """Return batches with the same meaning as the good one."""
    good = good_batch()
    mask = good["attention_mask"]
    order = torch.argsort(mask, dim=1, stable=True)
    left = {name: good[name].gather(1, order) for name in ("input_ids", "labels", "attention_mask")}
    return {
        "a mask of bools": _with(attention_mask=mask.bool()),
        "a mask of bytes": _with(attention_mask=mask.to(torch.uint8)),
        "padding on the left": {**good, **left},
        "views": _with(
            input_ids=lambda v: torch.stack([v, v], 2)[..., 0],
            vision=lambda v: {**v, "pixel_values": v["pixel_values"].mT.contiguous().mT},
        ),
        "None for what is absent": _with(attention_mask=mask),
        "an argument of a callback": _vision(scale=torch.ones(4)),
        "float64": _vision(pixel_values=lambda v: v.double()),
        "rows as numpy's": _vision(sample_index=torch.from_numpy(np.array([0, 1, 1, 3]))),
    }


_TENSORS = st.sampled_from(
    ["input_ids", "labels", "attention_mask", "pixel_values", "sample_index", "input_features"]
)
_VALUES = st.sampled_from([
    None, 0, 2.5, True, "x", [], [1], {}, {"a": 1}, object(), np.ones(3), torch.tensor(1),
    torch.ones(3), torch.zeros(0), torch.zeros(4, 0).long(), torch.ones(4, 9).long(),
    torch.full((4, T), float("nan")),
])
_DTYPES = st.sampled_from([
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32,
    torch.float64, torch.bfloat16, torch.complex64,
])
_NUMBERS = st.one_of(st.integers(-2, 100), st.sampled_from([2**31, -(2**63), 2**63 - 1, -100]))
_KEYS = st.sampled_from(["position_ids", "video", "scale", "vision", "audio"])
_VIEWS = {
    "mT": lambda value: value.mT,
    "unsqueeze": lambda value: value[None],
    "flatten": lambda value: value.flatten(),
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
    "numpy": lambda value: value.numpy(),
    "flip": lambda value: value.flip(0),
    "gradient": lambda value: value.clone().requires_grad_(),
}


def _cut(value: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    dim %= value.dim()
    return value[(slice(None),) * dim + (slice(start, stop),)]


def _put_at(value: torch.Tensor, place: int, number: int) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[place % value.numel()] = number
    return value


def changes() -> st.SearchStrategy:
    """Return one change of a batch: (tensor, function of it), or (key, value) to put into the
    batch.
    """
    numbers = st.integers(-3, 9)
    functions = st.one_of(
        st.builds(lambda value: lambda _: value, _VALUES),
        st.builds(lambda dtype: lambda value: value.to(dtype), _DTYPES),
        st.builds(lambda *how: lambda value: _cut(value, *how), numbers, numbers, numbers),
        st.builds(
            lambda times: lambda value: value.repeat(times, *[1] * (value.dim() - 1)),
            st.integers(0, 3),
        ),
        st.builds(lambda *how: lambda value: _put_at(value, *how), st.integers(0, 999), _NUMBERS),
        st.sampled_from(list(_VIEWS.values())),
    )
    return st.one_of(st.tuples(_TENSORS, functions), st.tuples(_KEYS, _VALUES))


def changed(batch: dict[str, Any], change: tuple[str, Any]) -> dict[str, Any]:
    """Apply a change to a batch as far as possible."""
    name, how = change
    if not callable(how):
        return {**batch, name: how}
    of = {"pixel_values": "vision", "sample_index": "vision", "input_features": "audio"}.get(name)
    holder = batch if of is None else batch.get(of)
    if not isinstance(holder, dict) or not isinstance(holder.get(name), torch.Tensor):
        return batch
    try:
        holder = {**holder, name: how(holder[name])}
    except (RuntimeError, IndexError, TypeError, ZeroDivisionError, NotImplementedError):
        return batch  # torch has no such tensor
    return holder if of is None else {**batch, of: holder}
