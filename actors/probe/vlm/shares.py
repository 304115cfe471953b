"""Probe of splits of a Hugging Face VLM's rows, items, tokens and parameters over processes.

Small copies run in one process; every share must give the matching part of the complete result.
``inputs`` are those of the VLM, or of a tower; ``towers`` are those that the language model reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.probe.attention import mixing_layers
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.items import probe_shared_items
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.stage_comparison import TrainingDraws, training_draws
from raymm.actors.probe.tensor import Trial, probe_tensor
from raymm.actors.probe.vlm.towers import Tower
from raymm.actors.probe.vlm.trials import LanguageTrial, TowerTrial, twice, twice_along
from raymm.actors.sharding.sample_rows import shares
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.sharding.vlm.item_rows import items_of_share
from raymm.actors.sharding.vlm.text_entry import Sharing, TextEntry
from raymm.actors.sharding.vlm.token_share import TokenShare, packed_tokens
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import VlmLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError
from raymm.kernels.attention import attention
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.hf.document_rows import Lengths, SharedRows

_PROCESSES = 2
# Relative tolerance; matrix products of other sizes are not exactly equal.
_NOISE = 1e-5
Inputs = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


def probe_rows(spec: VlmLanguageSpec, towers: tuple[Tower, ...], inputs: Inputs) -> None:
    """Check that the text's rows can be split over processes.

    Raises:
        ProbeError: rows give another result alone than in a batch.
    """
    rows = twice(inputs, towers)

    def probe(whole: nn.Module) -> None:
        trial = LanguageTrial(spec, towers, whole, rows)
        shape = tuple(rows["input_ids"].shape[:2])
        why = "rows give another result alone than in a batch"
        expected = _of_whole(trial)
        for local_rows in shares(shape[0], _PROCESSES):
            _compare_tokens(trial, Sharing(TokenShare(shape, local_rows)), expected, why)

    of_one_that_runs(cast(PartSource, spec.source).whole, probe)


def probe_tokens(
    spec: VlmLanguageSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> frozenset[str]:
    """Check that the text's tokens can be split, and return classes of layers that need all tokens.

    These layers mix tokens by other means than attention. All other layers may only depend on other
    tokens through attention, and positions must follow the arguments.

    Raises:
        ProbeError: the model has its own attention, or tokens in another order give another result.
    """

    def probe(whole: nn.Module) -> frozenset[str]:
        trial = LanguageTrial(spec, towers, whole, inputs)
        rows, length = inputs["input_ids"].shape[:2]
        order = torch.arange(length).roll(length // 3 + 1).flip(0)
        back = order.argsort()

        def attend(*tensors: Any, **options: Any) -> torch.Tensor:
            query, key, value = (each[:, :, back] for each in tensors[:3])
            return attention(query, key, value, tensors[3], **options)[0][:, :, order]

        def together(lengths: Lengths, padded: torch.Tensor | None) -> SharedRows:
            return SharedRows(lengths, [order], 0, lambda value: value, padded)

        share = TokenShare((rows, length), columns=order)
        sharing = Sharing(share, inputs.get("attention_mask"), attend, together)
        expected = _with_raymm_attention(trial)
        why = "its result depends on the order of tokens besides their position_ids"
        return _first_that_holds(
            _mixers_of(spec, towers, whole, inputs),
            lambda mixers: _compare_tokens(trial, sharing, expected, why, mixers),
        )

    return of_one_that_runs(cast(PartSource, spec.source).whole, probe)


def _mixers_of(
    spec: VlmLanguageSpec, towers: tuple[Tower, ...], whole: nn.Module, inputs: Inputs
) -> Iterator[frozenset[str]]:
    """Yield candidate sets of classes of layers that mix tokens by other means than attention."""
    if spec.packing:  # found by :func:`probe_packing`
        yield spec.mixers
        return
    yield frozenset()
    rows = twice(inputs, towers)
    trial = LanguageTrial(spec, towers, whole, rows)
    _with_raymm_attention(trial)
    shape = tuple(rows["input_ids"].shape[:2])
    tokens = packed_tokens(shape, rows.get("attention_mask"))
    yield from _mixing(trial, TokenShare(shape, packed=tokens, documents=tokens))


def probe_packing(
    spec: VlmLanguageSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> frozenset[str]:
    """Check that the text's rows can be packed, and return classes of layers that need separate
    rows.

    These layers mix tokens by other means than attention.

    Raises:
        ProbeError: documents in one row give another result than separate rows.
    """
    rows = twice(inputs, towers)

    def probe(whole: nn.Module) -> frozenset[str]:
        trial = LanguageTrial(spec, towers, whole, rows)
        shape, real = tuple(rows["input_ids"].shape[:2]), rows.get("attention_mask")
        tokens = packed_tokens(shape, real)
        share = TokenShare(shape, packed=tokens, documents=tokens)
        expected, why = _with_raymm_attention(trial), "documents in one row see one another"
        return _first_that_holds(
            dict.fromkeys((frozenset[str](), *_mixing(trial, share))),
            lambda mixers: _compare_tokens(trial, Sharing(share, real), expected, why, mixers),
        )

    return of_one_that_runs(cast(PartSource, spec.source).whole, probe)


def _first_that_holds(
    candidates: Iterable[frozenset[str]], check: Callable[[frozenset[str]], None]
) -> frozenset[str]:
    """Return the first candidate that passes, or raise the first candidate's error."""
    refused: list[ProbeError] = []
    for mixers in candidates:
        try:
            check(mixers)
        except ProbeError as error:
            refused.append(error)
        else:
            return mixers
    raise refused[0]


def _mixing(trial: LanguageTrial, part: TokenShare) -> list[frozenset[str]]:
    """Apply :func:`mixing_layers` to a model with packed rows."""
    model = copy.deepcopy(trial.model)
    documents = part.lengths()
    if (path := find_blocks(model)) is None or documents is None:
        return []

    def run() -> None:
        with torch.no_grad(), TextEntry(model, path).sharing(Sharing(part)):
            trial.logits(model, trial.features)

    return mixing_layers(list(block_list(model, path)), run, documents[0])


def _of_whole(trial: LanguageTrial) -> torch.Tensor:
    """Return the complete model's logits; raise NotRunError if the copy does not run."""
    try:
        with torch.no_grad():
            return trial.logits(copy.deepcopy(trial.model), trial.features)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(
            f"{type(trial.model).__name__} does not run on the example{because(error)}"
        ) from error


def _with_raymm_attention(trial: LanguageTrial) -> torch.Tensor:
    """Return the logits with the model's own attention, then switch the model to raymm's.

    Raises:
        ProbeError: the model cannot use another attention than its own.
    """
    if not hf_attention.can_use(trial.model):
        raise ProbeError(
            f"{type(trial.model).__name__} does not take its attention from transformers' "
            "AttentionInterface"
        )
    expected = _of_whole(trial)
    hf_attention.register()
    cast(Any, trial.model).set_attn_implementation(hf_attention.NAME)
    return expected


def _compare_tokens(
    trial: LanguageTrial, sharing: Sharing, expected: torch.Tensor, why: str,
    mixers: frozenset[str] = frozenset(),
) -> None:  # fmt: skip
    """Raise ProbeError if a share's logits differ from those of the complete model."""
    name = type(trial.model).__name__
    blocks = find_blocks(trial.model)
    if blocks is None:
        raise ProbeError(f"{name} has no list of blocks")
    model = copy.deepcopy(trial.model)
    entry = TextEntry(model, blocks, mixers)
    try:
        with torch.no_grad(), entry.sharing(sharing):
            logits = trial.logits(model, trial.features)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise ProbeError(
            f"{name} does not run on a part of its tokens{because(error)}"
        ) from error
    assert sharing.tokens is not None
    due = sharing.tokens.of_tokens(expected)
    if sharing.real is not None and logits.shape == due.shape:
        shown = sharing.tokens.of_tokens(sharing.real.bool())
        logits, due = logits[shown], due[shown]
    _compare(name, logits, due, why)


def _compare(name: str, output: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    if output.shape != expected.shape:
        raise ProbeError(
            f"{name}: {why} (shape {tuple(output.shape)}, not {tuple(expected.shape)})"
        )
    change = (output - expected).norm() / expected.norm()
    if not bool(change <= _NOISE):
        raise ProbeError(f"{name}: {why} (relative difference {float(change):.1e})")


def probe_items(spec: TowerSpec, inputs: Inputs) -> frozenset[int]:
    """Check that a tower's items can be split over processes; return ``TowerSpec.layers``.

    Raises:
        ProbeError: single items give other features than a batch of items.
    """
    several = {name: twice_along(value, 0) for name, value in inputs.items()}

    def probe(model: nn.Module) -> frozenset[int]:
        trial = TowerTrial(spec, model, several)
        name = type(model).__name__
        with torch.no_grad():
            try:
                form, expected, side = trial.packed(trial_copy(model), trial.inputs)
            except USER_CODE_RAISES as error:  # whatever a model may raise
                raise NotRunError(f"{name} does not run on the example{because(error)}") from error
            try:
                inputs_of = [items_of_share(spec.name, trial.inputs, rank, _PROCESSES)[0]
                             for rank in range(_PROCESSES)]  # fmt: skip
                outputs = [trial.packed(trial_copy(model), each) for each in inputs_of]
            except USER_CODE_RAISES as error:  # whatever a model may raise
                raise ProbeError(
                    f"{name} does not run on some of the items{because(error)}"
                ) from error
        counts = [_list_lengths(values) for values in (side, *(output[2] for output in outputs))]
        layers = frozenset(n for n, count in counts[0].items()
                           if all(lengths[n] == count for lengths in counts))  # fmt: skip
        why = "single items give other features than a batch of items"
        shared = [form.parts(tensors, values, layers) for _, tensors, values in outputs]
        features = [torch.cat(each) for each in zip(*shared, strict=True)]
        joined, _ = form.of_parts(features, side, layers)
        for tensor, due in zip(joined, expected, strict=True):
            _compare(name, tensor, due, why)
        return layers

    return of_one_that_runs(spec.source, probe)


def _list_lengths(side: Tensors) -> dict[int, int]:
    """Return the number of entries of each leaf that is a list."""
    return {
        int(name.removeprefix("rows/")): len(rows)
        for name, rows in side.items() if name.startswith("rows/")
    }  # fmt: skip


def probe_item_tokens(spec: TowerSpec, inputs: Inputs) -> None:
    """Check that the tokens of a tower's items can be split over processes.

    Raises:
        ProbeError: see :func:`raymm.actors.probe.items.probe_shared_items`.
    """
    form, constants = spec.form, dict(spec.constants)
    assert form is not None  # set by the tower's probe

    def read(output: Any) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in form.like(output).packed(output)[0]])

    probe_shared_items(spec.source, {**inputs, **constants}, read)


def draws_of_training_in(
    spec: VlmLanguageSpec | TowerSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> TrainingDraws:
    """Return the random decisions of the training forward of a language model or tower."""
    if not spec.source.trains:
        return TrainingDraws()
    trial = _trial(spec, towers, inputs)

    def probe(small: nn.Module) -> TrainingDraws:
        model, run, shown = trial.of(small)
        return training_draws(
            model.train(), find_blocks(model), lambda stage, _: run(stage, shown)
        )

    return of_one_that_runs(trial.source, probe)


def probe_vlm_tensor(
    spec: VlmLanguageSpec | TowerSpec, tp: int, towers: tuple[Tower, ...], inputs: Inputs
) -> TensorPlan:
    """Apply :func:`raymm.actors.probe.tensor.probe_tensor` to a module of a Hugging Face VLM."""
    return probe_tensor(spec.source, tp, spec.name, trial=_trial(spec, towers, inputs))


def _trial(
    spec: VlmLanguageSpec | TowerSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> Trial:
    def of_language(whole: nn.Module) -> tuple[nn.Module, Callable[..., torch.Tensor], Tensors]:
        assert isinstance(spec, VlmLanguageSpec)
        trial = LanguageTrial(spec, towers, whole, inputs)
        return trial.model.eval(), trial.logits, trial.features

    def of_tower(model: nn.Module) -> tuple[nn.Module, Callable[..., torch.Tensor], Tensors]:
        assert isinstance(spec, TowerSpec)
        trial = TowerTrial(spec, model, inputs)
        return model, trial.read, trial.inputs

    if isinstance(spec, VlmLanguageSpec):
        return Trial(cast(PartSource, spec.source).whole, of_language)
    return Trial(spec.source, of_tower)
