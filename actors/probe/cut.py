"""Probe of how a model class can be cut, on a small copy; models that cannot be cut are rejected.

Nothing here knows a model by name. A copy with few layers and a small vocabulary runs complete and
in stages on the CPU (:mod:`raymm.actors.probe.stage_comparison`). Results must be bit-identical.
Gradients of parameters outside the blocks show which stages need these parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from raymm.actors.modules.blocks import (
    block_list,
    checkpoints_itself,
    find_blocks,
    input_embeddings,
)
from raymm.actors.modules.brief_error import because, brief
from raymm.actors.modules.cut import CutInfo
from raymm.actors.modules.message import Read, first_tensor
from raymm.actors.probe.example_inputs import example_inputs, in_words
from raymm.actors.probe.small_model import parameters_of, small_models, trial_copy
from raymm.actors.probe.stage_comparison import (
    Run,
    TrainingDraws,
    compare_stages,
    training_draws,
)
from raymm.actors.weights.source import ModuleSource, on_meta
from raymm.errors import USER_CODE_RAISES, ModelError, NotRunError, ProbeError

# Tolerance for two ways to compute the same, relative to the largest logit.
_ALIKE = 1e-4



def encoder_inputs(model: nn.Module, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return working inputs for a small copy of an encoder: the given ones, or guesses.

    Raises:
        ProbeError: the forward rejects them, or they cannot be guessed.
    """
    if inputs is None:
        try:
            return example_inputs(model)
        except ModelError as error:
            raise NotRunError(str(error)) from error
    try:
        with torch.no_grad():
            trial_copy(model)(**copy.deepcopy(dict(inputs)))
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(
            f"{type(model).__name__} does not accept {in_words(inputs)} from "
            f"example_inputs{because(error)}; give inputs as a batch has them for the "
            "encoder", inputs,
        ) from error
    return dict(inputs)


def probe_language_model(
    source: ModuleSource, arguments: Callable[[nn.Module], Mapping[str, Any]] | None = None
) -> CutInfo:
    """Return the :class:`CutInfo` of a causal language model that gets ``inputs_embeds``.

    ``arguments`` returns the forward's arguments for a small copy; by default only embeddings.

    Raises:
        ProbeError: the model has no list of blocks, or its stages give other results.
    """
    if arguments is None:
        return _probe(source, _language_run)
    return _probe(source, lambda model: _merged_run(model, arguments))


def _merged_run(model: nn.Module, arguments: Callable[[nn.Module], Mapping[str, Any]]) -> Run:
    """Return a forward with all merged arguments, which every stage gets."""
    called_with = dict(arguments(model))
    try:
        with torch.no_grad():
            trial_copy(model)(**called_with, use_cache=False)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(
            f"{type(model).__name__} does not run on the arguments that the merge policy "
            f"returns{because(error)}; return arguments that its forward accepts"
        ) from error
    ids = torch.ones(called_with["inputs_embeds"].shape[:2], dtype=torch.int64)

    def run(stage: nn.Module, first: bool) -> torch.Tensor:
        embeds = input_embeddings(stage)(ids)
        embeds = embeds if first else torch.zeros(embeds.shape)
        return stage(**{**called_with, "inputs_embeds": embeds}, use_cache=False).logits

    return run


def small_language_model(source: ModuleSource) -> nn.Module:
    """Return the smallest copy of a causal language model that runs on ``inputs_embeds``.

    Raises:
        ProbeError: no copy runs.
    """

    def tried(model: nn.Module) -> nn.Module:
        _language_run(model)
        return model

    return of_one_that_runs(source, tried)


def _language_run(model: nn.Module) -> Run:
    ids = torch.arange(8)[None] % _vocabulary(model)
    _check_embeds(model, ids)

    def run(stage: nn.Module, first: bool) -> torch.Tensor:
        embeds = input_embeddings(stage)(ids)
        if not first:
            embeds = torch.zeros(embeds.shape)
        return stage(inputs_embeds=embeds, use_cache=False).logits

    return run


def _vocabulary(model: nn.Module) -> int:
    try:
        return input_embeddings(model).weight.shape[0]
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ProbeError(
            f"{type(model).__name__} has no token embeddings (get_input_embeddings) to embed text "
            "with; it cannot be the language model"
        ) from error


def _check_embeds(model: nn.Module, ids: torch.Tensor) -> None:
    """Raise ProbeError unless embeddings give the same result as the ids that they belong to."""
    name, replica = type(model).__name__, trial_copy(model)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(padding, int):  # some models have no position for padding
        ids = torch.where(ids == padding, (ids + ids.shape[1]) % _vocabulary(model), ids)

    def tried(**inputs: torch.Tensor) -> torch.Tensor | BaseException:
        try:
            return replica(**inputs, use_cache=False).logits.float()
        except USER_CODE_RAISES as error:  # whatever a model may raise
            return error

    with torch.no_grad():
        from_embeds = tried(inputs_embeds=input_embeddings(replica)(ids))
        from_ids = tried(input_ids=ids)
    if isinstance(from_embeds, torch.Tensor):
        if isinstance(from_ids, torch.Tensor) and not _alike(from_embeds, from_ids):
            raise ProbeError(
                f"{name} gives other logits for inputs_embeds than for the same tokens as "
                "input_ids: it uses the ids for more than their embeddings, but tokens that are "
                "merged with those of encoders have no ids; take another model, or the whole one "
                "(model: {path: FOLDER, train: ...})"
            )
        return
    if isinstance(from_ids, torch.Tensor):
        raise NotRunError(
            f"{name} runs on input_ids only, not on inputs_embeds ({brief(from_embeds)}), but "
            "tokens that are merged with those of encoders have no ids; take another model"
        )
    raise NotRunError(
        f"{name} does not run on inputs_embeds and give logits, as a language model must"
        f"{because(from_embeds)}; take another model"
    )


def _alike(values: torch.Tensor, others: torch.Tensor) -> bool:
    limit = _ALIKE * float(others.abs().max())
    return torch.allclose(values, others, rtol=0, atol=limit, equal_nan=True)


def probe_encoder(
    source: ModuleSource,
    inputs: Mapping[str, Any] | None = None,
    travels: Collection[str] = (),
    read: Read = first_tensor,
) -> CutInfo:
    """Return the :class:`CutInfo` of an encoder.

    Args:
        inputs: example keyword arguments; guessed from the config if None.
        travels: floating-point inputs whose values all stages have.
        read: selects the part of the output that other modules read.

    Raises:
        ProbeError: see :func:`probe_language_model`; or there are no working inputs.
    """
    return _probe(source, lambda model: _encoder_run(model, inputs, travels, read))


def _encoder_run(
    model: nn.Module, inputs: Mapping[str, Any] | None, travels: Collection[str] = (),
    read: Read = first_tensor,
) -> Run:
    example = encoder_inputs(model, inputs)

    def run(stage: nn.Module, first: bool) -> torch.Tensor:
        return read(stage(**(example if first else ghost_inputs(example, travels))))

    return run


def draws_of_training(
    source: ModuleSource, language_model: bool, inputs: Mapping[str, Any] | None = None,
    read: Read = first_tensor, cuts_rows: bool = False,
) -> TrainingDraws:  # fmt: skip
    """Return the random decisions of a module's training forward.

    Args:
        language_model: True for a causal language model, False for an encoder.
        inputs: example keyword arguments of an encoder.
        cuts_rows: True if a batch's rows are going to be split over processes.

    Raises:
        ProbeError: there are no working inputs.
    """
    if not source.trains:
        return TrainingDraws()

    def probe(model: nn.Module) -> TrainingDraws:
        run = _language_run(model) if language_model else _encoder_run(model, inputs, read=read)
        doubled, ids = None, None
        if cuts_rows and language_model:
            ids = torch.arange(8)[None] % _vocabulary(model)
            doubled = partial(_run_two_texts, ids)
        elif cuts_rows:
            doubled = partial(_run_two_items, encoder_inputs(model, inputs))
        return training_draws(
            model.train(), find_blocks(model), run, doubled, None if ids is None else ids.shape[1]
        )

    return of_one_that_runs(source, probe)


def _run_two_texts(ids: torch.Tensor, model: nn.Module, _: bool) -> torch.Tensor:
    embeds = input_embeddings(model)(ids.repeat(2, 1))
    return model(inputs_embeds=embeds, use_cache=False).logits


def _run_two_items(inputs: Mapping[str, Any], model: nn.Module, _: bool) -> Any:
    return model(**{
        name: torch.cat([value[:1]] * 2) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    })


def ghost_inputs(inputs: Mapping[str, Any], travels: Collection[str] = ()) -> dict[str, Any]:
    """Return inputs whose floats are reduced to their shapes, except those in ``travels``."""
    return {
        name: torch.zeros((), dtype=value.dtype).expand(value.shape)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in travels
        else value
        for name, value in inputs.items()
    }


Learned = TypeVar("Learned")


def of_one_that_runs(
    source: ModuleSource, probe: Callable[[nn.Module], Learned]
) -> Learned:
    """Return the result of a probe for the smallest copy that runs.

    Raises:
        ProbeError: as the probe, or no copy runs.
    """
    failed: list[NotRunError] = []
    largest = 0
    for model in small_models(source):
        largest = max(largest, parameters_of(model))
        try:
            return probe(model)
        except NotRunError as error:
            failed.append(error)
            if error.inputs is not None and _ends_the_same(source, error):
                raise
    if largest >= (full_size := parameters_of(source.skeleton())):
        raise failed[-1]
    raise NotRunError(
        f"{failed[0]} (found with smaller models of the class; at its full size, {full_size:,} "
        "parameters, it is too large to be tried here: if it does run, give it one stage (pp 1))"
    ) from failed[0]


def _ends_the_same(source: ModuleSource, refused: NotRunError) -> bool:
    """Return True if the complete encoder on meta fails with the same error as its copy.

    Then the inputs are wrong, and larger copies are pointless.
    """
    inputs = tree_map_only(torch.Tensor, lambda value: value.to("meta"), dict(refused.inputs or {}))
    try:
        with torch.no_grad():
            on_meta(source.skeleton()).to("meta")(**inputs)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        cause = refused.__cause__
        return cause is not None and brief(error) == brief(cause)
    return False


def _probe(source: ModuleSource, run_of: Callable[[nn.Module], Run]) -> CutInfo:
    skeleton = source.skeleton()
    if checkpoints_itself(skeleton):
        raise ProbeError(
            f"{type(skeleton).__name__} has its own gradient checkpointing enabled, which reruns "
            "blocks without the tensors that another stage sent; call "
            "gradient_checkpointing_disable() and plan it with recompute, or give it one stage (pp "
            "1)"
        )

    def probe(model: nn.Module) -> CutInfo:
        name = type(model).__name__
        blocks = find_blocks(model)
        if blocks is None:
            raise ProbeError(
                f"{name} has no list of blocks to cut between; give it one stage (pp 1)"
            )
        if len(block_list(model, blocks)) < 2:
            raise ProbeError(f"{name} has a single block; give it one stage (pp 1)")
        return compare_stages(model, blocks, run_of(model), source.trains)

    return of_one_that_runs(source, probe)
