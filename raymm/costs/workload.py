"""Load of one microbatch on each module, for analytic costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from raymm.actors.modules.merge import IGNORE_INDEX, Prepend
from raymm.actors.modules.message import MicrobatchContext, first_tensor
from raymm.actors.probe.vlm.cut import of_zeros
from raymm.actors.weights.model_part import PartSource, is_within
from raymm.costs.forward_run import kept_elements
from raymm.costs.load import Load, default_tokens
from raymm.costs.observed_load import FLAT_ROWS, IMAGE_DIMENSIONS, Observation, observe
from raymm.data import DataConfig, local_steps
from raymm.data.sampling.batching import ItemTokens
from raymm.errors import USER_CODE_RAISES, PlanError, ProbeError
from raymm.kernels.cross_entropy import token_cross_entropy_sum
from raymm.model.batch_rules import IDS, LABELS, complete_microbatch
from raymm.model.encoder_trial import skeleton_chain
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm

# Tokens per item of an encoder if they are unknown.
ASSUMED_TOKENS = 256
# Maximum tokens of one sample; larger numbers are treated as mistakes.
MOST_TOKENS = 10**9


@dataclass(frozen=True)
class ModuleWorkloads:
    """Loads by module, and notes for the user."""

    by_module: Mapping[str, Load]
    notes: tuple[str, ...] = ()


@singledispatch
def microbatch_workload(model: Model, microbatch: Mapping[str, Any]) -> ModuleWorkloads:
    """Return the loads of a real microbatch on the modules of a model.

    An encoder's tokens come from running its skeleton on the shapes of one item on the meta device,
    without weights or memory. If that fails, they come from its config.
    """
    raise TypeError(f"models of class {type(model).__name__} have no microbatch workload")


@microbatch_workload.register
def _(model: MultimodalModule, microbatch: Mapping[str, Any]) -> ModuleWorkloads:
    microbatch = complete_microbatch(microbatch, model.encoder_names)
    loads: dict[str, Load] = {}
    notes: list[str] = []
    lengths = microbatch["attention_mask"].sum(dim=1)
    rows = len(lengths)
    for name in model.encoder_names:
        items = microbatch.get(name)
        sizes = encoder_tokens(model, name, items)
        if sizes is None:
            notes.append(
                f"tokens per item of encoder {name!r} are unknown; {ASSUMED_TOKENS} assumed (set "
                f"planning.tokens.{name})"
            )
            sizes = ASSUMED_TOKENS, ASSUMED_TOKENS
        block_tokens, output_tokens = sizes
        index = items["sample_index"] if items else torch.arange(rows)
        loads[name] = (items and encoder_load(model, name, items, len(index))) or (
            Load(len(index), block_tokens)
        )
        if isinstance(model.merge, Prepend):
            lengths = lengths + torch.bincount(index, minlength=rows) * output_tokens
    labels = int((microbatch["labels"][:, 1:] != IGNORE_INDEX).sum())
    longest = max(int(lengths.max()), 1)
    loads[model.text_module] = Load(rows, longest, min(labels, rows * longest))
    return ModuleWorkloads(loads, tuple(notes))


@microbatch_workload.register
def _(model: PretrainedVlm, microbatch: Mapping[str, Any]) -> ModuleWorkloads:
    # A tower has its observed load, otherwise the tokens of its largest input's rows, or for images
    # those of its config.
    loads, notes = {}, []
    for name in model.tower_names:
        tower_inputs = [microbatch[e] for _, e in model.tower(name).arguments if e in microbatch]
        inputs = max(tower_inputs, key=lambda value: value.numel(), default=None)
        if inputs is None:
            loads[name] = Load(1, 1)
            notes.append(f"tower {name!r} has nothing to do: no sample of the microbatch has items")
            continue
        if (observed := tower_load(model, name, microbatch)) is not None:
            loads[name] = observed
            continue
        if inputs.dim() == FLAT_ROWS:  # patches of all items, one after another
            loads[name] = Load(1, len(inputs))
            continue
        try:
            skeleton = model.tower_spec(name).source.skeleton()
            tokens = default_tokens(skeleton.get_submodule(model.tower(name).root))
        except PlanError:
            tokens = ASSUMED_TOKENS
            notes.append(
                f"tokens per item of tower {name!r} are unknown; {tokens} assumed (set "
                f"planning.tokens.{name})"
            )
        count = inputs.shape[:-IMAGE_DIMENSIONS].numel() or 1
        loads[name] = Load(count, tokens)
    loads[model.text_module] = _language_load(model, microbatch)
    return ModuleWorkloads(loads, tuple(notes))


def tower_load(model: PretrainedVlm, name: str, microbatch: Mapping[str, Any]) -> Load | None:
    """Return a tower's load for a microbatch with items, observed in a run without values or in a
    run up to its blocks; None if the run does not reach them."""
    tower, source = model.tower(name), cast(PartSource, model.tower_spec(name).source)
    inputs = {**(tower.inputs(microbatch) or {}), **dict(tower.constants)}
    model_part = of_zeros(source)
    (observation,) = observe(model_part, inputs, model_part)
    if not observation.tokens:
        model_part = of_zeros(source)
        (observation,) = observe(model_part, inputs, model_part, leave=True)
    load = observation.load()
    if load is not None and observation.output is not None:
        (halved,) = observe(model_part, inputs, model_part, dtype=torch.bfloat16)
        load = replace(load, kept=kept_elements(observation, halved, load.total))
        tensors, _ = tower.form.like(observation.output).packed(observation.output)
        load = replace(load, handed=sum(t.numel() for t in tensors) / load.total)
    return load


def encoder_load(
    model: MultimodalModule, name: str, items: Mapping[str, Any], count: int
) -> Load | None:
    """Return the load of an encoder and its projector for ``count`` items, observed on the first of
    them in a run without values; None if there is no such run."""
    stage = skeleton_chain(model.encoder_spec(name))
    assert stage.module is not None  # a whole chain has one
    modules = [stage.module] if stage.projector is None else [stage.module, stage.projector]
    first = {k: v[:1] for k, v in items.items() if k != "sample_index"}

    def run(**inputs: Any) -> None:
        stage.run(inputs, {}, MicrobatchContext(1))

    observed, *projected = observe(run, first, *modules)
    load = observed.load(count)
    if load is None or load.handed is None:
        return None
    halved, *projected_halved = observe(run, first, *modules, dtype=torch.bfloat16)
    load = replace(load, kept=kept_elements(observed, halved, load.total // count))
    for observation, half in zip(projected, projected_halved, strict=True):
        item_total = load.total // count
        load = replace(load, projector_places=observation.places_per(item_total))
        if observation.output is not None:
            handed = first_tensor(observation.output).numel() / item_total
            saved_elements = kept_elements(observation, half, item_total)
            load = replace(load, projector_handed=handed, projector_kept=saved_elements)
    return load


def _language_load(model: PretrainedVlm, microbatch: Mapping[str, Any]) -> Load:
    """Return the load of a whole model's language model. Attention to tower features, products with
    them, and bytes that autograd saves are observed in a run without values."""
    ids, labels = microbatch[IDS], microbatch[LABELS]
    learned = int((labels[:, 1:] != IGNORE_INDEX).sum())
    rows, length = ids.shape
    load = Load(rows, length, min(learned, ids.numel()))
    if not model.towers:
        return load
    inputs = {name: value for name, value in microbatch.items() if name in model.example}
    relayed: dict[str, int] = {}

    def observed(dtype: torch.dtype, few: bool) -> Observation:
        full_model = of_zeros(PartSource(model.source, (), True))

        def run(**inputs: Any) -> None:
            for tower in model.towers:
                if (own := tower.inputs(inputs)) is not None:
                    with torch.no_grad():
                        features = tower.output(full_model, own)
                    # Ranks of the language model receive the features instead of computing them.
                    features = tree_map_only(torch.Tensor, _received, features)
                    tensors, _ = tower.form.like(features).packed(features)
                    relayed[tower.name] = sum(tensor.numel() for tensor in tensors)
                    tower.call.replace(full_model, lambda *_, features=features, **__: features)
            logits = full_model(**inputs, use_cache=False).logits
            token_cross_entropy_sum(logits.flatten(0, 1), torch.zeros(rows * length).long())

        return observe(run, inputs, full_model, masks=False, dtype=dtype, few=few)[0]

    observation, halved = observed(torch.float32, False), observed(torch.bfloat16, True)
    try:
        relays = model.cut_language_spec().relays
    except ProbeError:  # the model stays on one stage
        relays = False
    own = {name for name, _ in model.language_spec().source.skeleton().named_parameters()}
    return replace(
        load,
        relayed=relays * sum(relayed.values()) / load.total,
        kept=kept_elements(observation, halved, load.total),
        mixing=() if observation.output is None else observation.mixing_per(load.total),
        places=tuple(
            (name, count) for name, count in observation.places_per(load.total)
            if f"{name}.weight" in own
        ),
        attention=tuple(
            (name, observation.attention[name].over(load.total))
            for name in sorted(observation.cross)
            if any(is_within(parameter, (name,)) for parameter in own)
        ),
    )


def _received(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def item_tokens(
    model: MultimodalModule, items: Mapping[str, Mapping[str, Any]]
) -> dict[str, ItemTokens]:
    """Return the tokens of an item of every encoder, where they are known. ``items`` are inputs by
    modality of items of the same shapes; without them, an encoder's config decides."""
    tokens = {}
    for name in model.encoder_names:
        sizes = encoder_tokens(model, name, items.get(name))
        if sizes is not None:
            block_tokens, output_tokens = sizes
            tokens[name] = ItemTokens(
                block_tokens, output_tokens * isinstance(model.merge, Prepend)
            )
    return tokens


def token_workload(
    model: MultimodalModule, tokens: Mapping[str, int], samples: int = 1, text: int | None = None
) -> ModuleWorkloads:
    """Return the loads of microbatches with known lengths. ``tokens`` are per sample (an encoder
    has one item per sample), and default to those of an encoder's config. ``text`` is the longest
    text of a sample, for a language model without ``tokens``. Raises PlanError for an unknown
    module, a number below 1, or an unknown length."""
    check_tokens(model, tokens)
    names = model.module_names
    notes = []
    lengths = dict(tokens)
    for name in model.encoder_names:
        if name not in lengths:
            try:
                lengths[name] = default_tokens(model.encoder_spec(name).source.skeleton())
            except PlanError as error:
                raise PlanError(f"tokens of {name!r} are not given: {error}") from None
    if (language_model := model.text_module) not in lengths:
        if text is None:
            raise PlanError(
                f"tokens of {language_model!r} are not given; give the length of a merged sample, "
                f"e.g. {language_model}=4096"
            )
        prepends = isinstance(model.merge, Prepend)
        extra = sum(lengths[name] for name in model.encoder_names) if prepends else 0
        lengths[language_model] = text + extra
        notes.append(
            f"a sample is assumed to have {text + extra} tokens in the language model: the longest "
            "text allowed" + (" and all of the encoders' tokens" if extra else "")
        )
    return ModuleWorkloads({name: Load(samples, lengths[name]) for name in names}, tuple(notes))


def changed_tokens(loads: ModuleWorkloads, tokens: Mapping[str, int]) -> ModuleWorkloads:
    """Return loads of the same samples with other lengths."""
    changed = {
        name: replace(load, tokens=tokens[name], labels=None) if name in tokens else load
        for name, load in loads.by_module.items()
    }
    return ModuleWorkloads(changed, loads.notes)


def check_tokens(model: Model, tokens: Mapping[str, int]) -> None:
    """Raise a PlanError for an unknown module or a number below 1."""
    names = model.module_names
    for name, number in tokens.items():
        if name not in names:
            raise PlanError(f"tokens name {name!r}; the model's modules are {', '.join(names)}")
        if type(number) is not int or not 1 <= number <= MOST_TOKENS:
            raise PlanError(
                f"tokens of {name!r} is {number!r}; it must be a whole number >= 1, at most "
                f"{MOST_TOKENS}"
            )


def encoder_tokens(
    model: MultimodalModule, name: str, items: Mapping[str, Any] | None
) -> tuple[int, int] | None:
    """Return the tokens of an item in an encoder's blocks, and of its features; None if unknown.
    ``items`` are inputs of one or several items of the same shapes, on any device. None reads the
    encoder's config."""
    stage = skeleton_chain(model.encoder_spec(name))
    module = stage.module
    assert module is not None  # a whole chain has one
    if items:
        inputs = {k: v[:1].to("meta") for k, v in items.items() if k != "sample_index"}
        observation = Observation(module)
        try:
            with torch.no_grad():
                output_tokens = stage.run(inputs, {}, MicrobatchContext(1)).tensors[0].shape[1]
            return observation.tokens or output_tokens, output_tokens
        except USER_CODE_RAISES:  # not every forward runs without data; the config decides then
            pass
        finally:
            observation.close()
    try:
        tokens = default_tokens(module)
    except PlanError:
        return None
    return tokens, tokens


# Number of steps that are searched for a microbatch with every modality.
MAX_STEPS = 8


def full_microbatch(config: DataConfig, modalities: Sequence[str]) -> dict[str, Any]:
    """Return a microbatch with every modality, from the first step that has one. Of several, the
    one with the most items is chosen, then the one with the most text. Raises PlanError if there is
    none in the first :data:`MAX_STEPS` steps."""
    found_modalities: set[str] = set()
    for step in local_steps(config, steps=MAX_STEPS):
        complete = [
            (sum(map(len, meta.items.values())), meta.num_samples * meta.seq_len, -index)
            for index, meta in enumerate(step.meta) if set(modalities) <= set(meta.items)
        ]
        if complete:
            return step.microbatches[-max(complete)[2]]
        found_modalities |= {name for meta in step.meta for name in meta.items}
    missing = sorted(set(modalities) - found_modalities)
    shortage = f"no sample with {missing}" if missing else f"no microbatch with all of {modalities}"
    raise PlanError(f"the first {MAX_STEPS} steps of data.train have {shortage}; nothing to run")
