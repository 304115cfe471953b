"""How much one microbatch is to each module: what analytic costs are computed for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name
from raymm.actors.modules.cut import CutReached
from raymm.actors.modules.merge import IGNORE_INDEX, Prepend
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.whole.cut import of_zeros
from raymm.actors.probe.whole.towers import as_copied
from raymm.actors.weights.model_part import PartSource
from raymm.actors.weights.source import on_meta
from raymm.costs.load import Load, LoadError, default_tokens
from raymm.data.sampling.batching import ItemTokens
from raymm.errors import USER_CODE_RAISES
from raymm.model.batch_rules import IDS, LABELS, complete_microbatch
from raymm.model.encoder_trial import skeleton_chain
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel

# Tokens of an item of an encoder that does not say and cannot be asked.
ASSUMED_TOKENS = 256
# Dimensions of patches of all items in one tensor, and of an image of pixels.
FLAT_ROWS, IMAGE_DIMENSIONS = 2, 3
# Of one sample; more is a mistake.
MOST_TOKENS = 10**9


@dataclass(frozen=True)
class ModuleWorkloads:
    """Workload by module, and remarks a person should see."""

    by_module: Mapping[str, Load]
    notes: tuple[str, ...] = ()


def microbatch_workload(
    model: MultimodalModule | WholeModel, microbatch: Mapping[str, Any]
) -> ModuleWorkloads:
    """The loads of a real microbatch.

    An encoder's tokens come from running its skeleton, without weights or memory (torch's meta
    device), on the shapes of one item; where that does not work, from its config.

    Args:
        model: the description.
        microbatch: as :meth:`MultimodalModule.forward` takes it.
    """
    if isinstance(model, WholeModel):
        return _whole_workload(model, microbatch)
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
                f"encoder {name!r} does not say how many tokens an item has; {ASSUMED_TOKENS} "
                f"assumed (planning.tokens.{name} would say)"
            )
            sizes = ASSUMED_TOKENS, ASSUMED_TOKENS
        inside, handed_on = sizes
        index = items["sample_index"] if items else torch.arange(rows)
        loads[name] = Load(len(index), inside)
        if isinstance(model.merge, Prepend):
            lengths = lengths + torch.bincount(index, minlength=rows) * handed_on
    labels = int((microbatch["labels"][:, 1:] != IGNORE_INDEX).sum())
    longest = max(int(lengths.max()), 1)
    loads[LANGUAGE_MODEL] = Load(rows, longest, min(labels, rows * longest))
    return ModuleWorkloads(loads, tuple(notes))


def _whole_workload(model: WholeModel, microbatch: Mapping[str, Any]) -> ModuleWorkloads:
    """Of a whole model's microbatch. A tower has the tokens that were seen to enter its blocks on
    the meta device, else those of its largest input's rows, or of an image of pixels what its
    config says."""
    ids, labels = microbatch[IDS], microbatch[LABELS]
    loads, notes = {}, []
    for name in model.tower_names:
        own = [microbatch[e] for _, e in model.tower(name).arguments if e in microbatch]
        inputs = max(own, key=lambda value: value.numel(), default=None)
        if inputs is None:
            loads[name] = Load(1, 1)
            notes.append(f"tower {name!r} has nothing to do: no sample of the microbatch has items")
            continue
        if (seen := _seen_load(model, name, microbatch)) is not None:
            loads[name] = seen
            continue
        if inputs.dim() == FLAT_ROWS:  # patches of all items, one after another
            loads[name] = Load(1, len(inputs))
            continue
        try:
            skeleton = model.tower_spec(name).source.skeleton()
            tokens = default_tokens(skeleton.get_submodule(model.tower(name).root))
        except LoadError:
            tokens = ASSUMED_TOKENS
            notes.append(
                f"tower {name!r} does not say how many tokens an item has; {tokens} assumed "
                f"(planning.tokens.{name} would say)"
            )
        count = inputs.shape[:-IMAGE_DIMENSIONS].numel() or 1
        loads[name] = Load(count, tokens)
    learned = int((labels[:, 1:] != IGNORE_INDEX).sum())
    rows, length = ids.shape
    loads[LANGUAGE_MODEL] = Load(rows, length, min(learned, ids.numel()))
    return ModuleWorkloads(loads, tuple(notes))


def _seen_load(model: WholeModel, name: str, microbatch: Mapping[str, Any]) -> Load | None:
    """Of a tower that runs without values, or up to its blocks without weights; None of others."""
    tower, source = model.tower(name), cast(PartSource, model.tower_spec(name).source)
    inputs = tower.inputs(microbatch) or {}
    shapes = tree_map_only(torch.Tensor, lambda value: value.to("meta"), inputs)
    return _load_of(on_meta(source.skeleton()).to("meta"), {**shapes, **dict(tower.constants)}) or (
        _load_of(of_zeros(source), {**inputs, **dict(tower.constants)}, leave=True)
    )


def small_tower_load(model: WholeModel, name: str) -> Load | None:
    """Return what a tower has to do on the model's example, as seen on a small copy of it; None if
    the copy does not come to its blocks.

    Args:
        model: the description.
        name: of the tower.
    """
    tower, source = model.tower(name), cast(PartSource, model.tower_spec(name).source)
    inputs = tower.inputs(model.example) or {}

    def probe(copied: nn.Module) -> Load | None:
        return _load_of(copied, {**as_copied(source, copied, inputs), **dict(tower.constants)})

    return of_one_that_runs(source, probe)


def _load_of(module: nn.Module, inputs: Mapping[str, Any], leave: bool = False) -> Load | None:
    """What is seen of a tower; nothing if it does not come to its blocks.

    Args:
        module: it.
        inputs: of it.
        leave: at its first block.
    """
    seen, products = _Entering(module, leave), _Products(module)
    try:
        with torch.no_grad():
            module(**inputs)
    except USER_CODE_RAISES:  # not every forward runs without data; then blocks may have run
        pass
    finally:
        seen.close()
        products.close()
    if seen.tokens is None:
        return None
    return Load(seen.rows, seen.tokens, places=products.per_token(seen.rows * seen.tokens))


class _Products:
    """Notes for how many places linear layers and convolutions work."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: dict[str, int] = {}
        self._handles = [
            child.register_forward_hook(partial(self._note, name))
            for name, child in module.named_modules()
            if isinstance(child, nn.Linear | _ConvNd)
        ]

    def _note(self, name: str, module: nn.Module, _: Any, output: torch.Tensor) -> None:
        channels = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        count = output.numel() // int(cast(int, channels))
        self._places[name] = self._places.get(name, 0) + count

    def per_token(self, tokens: int) -> tuple[tuple[str, float], ...]:
        """By name, divided by a number of tokens."""
        return tuple((name, count / tokens) for name, count in self._places.items())

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def item_tokens(
    model: MultimodalModule, items: Mapping[str, Mapping[str, Any]]
) -> dict[str, ItemTokens]:
    """Tokens of an item of every encoder that says, or can be asked.

    Args:
        model: the description.
        items: modality -> the encoder's inputs of one item or several of the same shapes; of an
            encoder without one, its config is asked.
    """
    tokens = {}
    for name in model.encoder_names:
        sizes = encoder_tokens(model, name, items.get(name))
        if sizes is not None:
            inside, handed_on = sizes
            tokens[name] = ItemTokens(inside, handed_on * isinstance(model.merge, Prepend))
    return tokens


def token_workload(
    model: MultimodalModule, tokens: Mapping[str, int], samples: int = 1, text: int | None = None
) -> ModuleWorkloads:
    """The loads of microbatches of which only lengths are known.

    Args:
        model: the description.
        tokens: per module, tokens of a sample (an encoder has one item per sample). An encoder
            that is not in it has as many as its config says.
        samples: per microbatch.
        text: the longest text of a sample, for a language model that is not in ``tokens``.

    Raises:
        LoadError: on an unknown module, a number below 1, or a length that nobody says.
    """
    check_tokens(model, tokens)
    names = model.module_names
    notes = []
    lengths = dict(tokens)
    for name in model.encoder_names:
        if name not in lengths:
            try:
                lengths[name] = default_tokens(model.encoder_spec(name).source.skeleton())
            except LoadError as error:
                raise LoadError(f"tokens of {name!r} are not given: {error}") from None
    if LANGUAGE_MODEL not in lengths:
        if text is None:
            raise LoadError(
                f"tokens of {LANGUAGE_MODEL!r} are not given; say how long a merged sample is, "
                f"e.g. {LANGUAGE_MODEL}=4096"
            )
        prepends = isinstance(model.merge, Prepend)
        more = sum(lengths[name] for name in model.encoder_names) if prepends else 0
        lengths[LANGUAGE_MODEL] = text + more
        notes.append(
            f"a sample is taken to have {text + more} tokens in the language model: the longest "
            "text allowed" + (" and all of the encoders' tokens" if more else "")
        )
    return ModuleWorkloads({name: Load(samples, lengths[name]) for name in names}, tuple(notes))


def changed_tokens(loads: ModuleWorkloads, tokens: Mapping[str, int]) -> ModuleWorkloads:
    """The same samples with other lengths."""
    changed = {
        name: replace(load, tokens=tokens[name], labels=None) if name in tokens else load
        for name, load in loads.by_module.items()
    }
    return ModuleWorkloads(changed, loads.notes)


def check_tokens(model: MultimodalModule | WholeModel, tokens: Mapping[str, int]) -> None:
    """
    Raises:
        LoadError: on an unknown module or a number below 1.
    """
    names = model.module_names
    for name, number in tokens.items():
        if name not in names:
            raise LoadError(f"tokens name {name!r}; the model's modules are {', '.join(names)}")
        if type(number) is not int or not 1 <= number <= MOST_TOKENS:
            raise LoadError(
                f"tokens of {name!r} is {number!r}; it must be a whole number >= 1, at most "
                f"{MOST_TOKENS}"
            )


def encoder_tokens(
    model: MultimodalModule, name: str, items: Mapping[str, Any] | None
) -> tuple[int, int] | None:
    """Tokens of an item in an encoder's blocks, and of what it hands on; None if it does not say.

    Args:
        model: the description.
        name: of the encoder.
        items: its inputs of one item or several of the same shapes, on any device; None asks its
            config.
    """
    stage = skeleton_chain(model.encoder_spec(name))
    module = stage.module
    assert module is not None  # a whole chain has one
    if items:
        inputs = {k: v[:1].to("meta") for k, v in items.items() if k != "sample_index"}
        seen = _Entering(module)
        try:
            with torch.no_grad():
                handed_on = stage.run(inputs, {}, MicrobatchContext(1)).tensors[0].shape[1]
            return seen.tokens or handed_on, handed_on
        except USER_CODE_RAISES:  # not every forward runs without data; then the config is asked
            pass
        finally:
            seen.close()
    try:
        tokens = default_tokens(module)
    except LoadError:
        return None
    return tokens, tokens


class _Entering:
    """Notes the length of the hidden state that enters a module's first block.

    Args:
        module: whose.
        leave: its forward there.
    """

    def __init__(self, module: torch.nn.Module, leave: bool = False) -> None:
        self.tokens: int | None = None
        self.rows, self._leave = 1, leave
        path = find_blocks(module)
        first = module if path is None else next(iter(block_list(module, path)), module)
        # Of its norms and biases: by them channels that come last are told from those before.
        self._widths = {len(p) for p in first.parameters() if p.dim() == 1}
        self._name = "hidden_states" if path is None else hidden_name(first)
        self._handle = first.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get(self._name)
        if isinstance(hidden, torch.Tensor) and hidden.dim() >= FLAT_ROWS and (
            hidden.dim() == IMAGE_DIMENSIONS or hidden.shape[-1] in self._widths
        ):
            # (rows, tokens, width), tokens of all items one after another, or in rows and columns
            # of an image; with channels before them, what is handed on says how many there are.
            self.rows = 1 if hidden.dim() == FLAT_ROWS else hidden.shape[0]
            self.tokens = hidden.shape[:-1].numel() // self.rows
        if self._leave:
            raise CutReached(cast(torch.Tensor, hidden))

    def close(self) -> None:
        self._handle.remove()
