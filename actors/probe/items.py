"""Probe of context parallelism for encoders: can an item's tokens be split over processes?

As in :mod:`raymm.actors.probe.cut`, a small copy runs, without knowledge of the model: once
complete, then once per process, one after the other. The data that a process would receive is taken
from a record of the complete run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.message import Read, first_tensor
from raymm.actors.probe.cut import encoder_inputs, of_one_that_runs
from raymm.actors.probe.draws import DrawnShapes
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.stage_comparison import skips_blocks
from raymm.actors.sharding.context_method import Attend
from raymm.actors.sharding.shared_items import Peers, SharedItems
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ModelError, ProbeError
from raymm.kernels.attention import attention
from raymm.kernels.context_parallel.layout import ContextLayout, local_masks
from raymm.kernels.hf import self_attention as hf_attention

_PROCESSES = 2
# Relative to the largest token of the output. Not exactly zero because attention kernels and the
# sizes of matrix products differ.
_NOISE = 1e-5
# Noise added to random weights: zeros (gates, biases) would hide their factors.
_PERTURBATION = 0.02
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)


def probe_shared_items(
    source: ModuleSource, inputs: dict[str, Any] | None = None, read: Read = first_tensor
) -> None:
    """Check that only attention mixes an encoder's tokens, so that processes can split them.

    Args:
        inputs: example keyword arguments; guessed from the config if None.
        read: selects the part of the output that other modules read.

    Raises:
        ProbeError: the encoder has no list of blocks (plain modules, convolutional nets) or its own
            attention; gives other results with split tokens; or draws random numbers per layer or
            item in training.
    """
    skeleton = source.skeleton()
    name = type(skeleton).__name__
    try:
        _check_structure(skeleton)
        hf_attention.register()
        model, inputs = of_one_that_runs(
            source, lambda model: (model, encoder_inputs(model, inputs))
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * _PERTURBATION)
            _check_shares(model, inputs, skeleton.training, read)
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot have cp above 1"
            f"{because(error, 'its forward fails where it is tried')}") from error


def _check_structure(skeleton: nn.Module) -> None:
    blocks = find_blocks(skeleton)
    if blocks is None:
        raise ProbeError("it has no list of blocks whose tokens could be split")
    if not hf_attention.can_use(skeleton):
        raise ProbeError("it does not take its attention from transformers' AttentionInterface")
    if not skeleton.training:
        return
    for module in skeleton.get_submodule(blocks).modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ProbeError(f"a {type(module).__name__} in its blocks mixes tokens in training")


def _check_shares(
    model: nn.Module, inputs: dict[str, Any], training: bool, read: Read
) -> None:
    # Seeded before every run: encoders may drop random patches.
    torch.default_generator.manual_seed(0)
    expected = read(trial_copy(model)(**inputs))
    full_run = _Whole()
    if training:
        _check_training(trial_copy(model).train(), inputs, read)
    _compare(
        _run(trial_copy(model), inputs, full_run, read), expected,
        f"its attention is not what {hf_attention.NAME} attention makes of it",
    )  # fmt: skip
    tokens = full_run.tokens.shape[1]
    if tokens < _PROCESSES:
        raise ProbeError(
            f"its example inputs give {tokens} token per item, which cannot be split"
        )
    for rank in range(_PROCESSES):
        share = _Part(full_run, rank)
        try:
            output = _run(trial_copy(model), inputs, share, read)
        except ModelError:
            raise
        except _FAILURES as error:
            raise ProbeError(f"it does not run on a part of its tokens{because(error)}") from error
        if share.calls != len(full_run.attended):
            raise ProbeError(
                "a process that has part of the tokens calls attention a different number of times"
            )
        why = "something besides attention mixes tokens in its blocks, or counts them"
        _compare(output, expected, f"parts of its tokens give another result than the whole: {why}")


def _check_training(model: nn.Module, inputs: dict[str, Any], read: Read) -> None:
    """Check restrictions that only apply in training."""

    def run(stage: nn.Module, _: bool) -> torch.Tensor:
        return read(stage(**inputs))

    blocks = find_blocks(model)
    assert blocks is not None  # checked by _check_structure
    if skips_blocks(model, blocks, run):
        raise ProbeError(
            "it leaves out layers at random in training, but all processes must run the same "
            "layers; set the probability in its config to 0 (layerdrop)"
        )
    full_run = _Whole()
    with DrawnShapes(block_list(model, blocks)) as drawn:
        _run(model, inputs, full_run, read)
    tokens = full_run.tokens.shape[1]
    if without := [shape for shape in drawn.shapes if tokens not in shape]:
        raise ProbeError(
            f"its blocks draw random numbers of shape {without[0]} in training, for whole items: "
            "processes would draw differently for one item; set the probability in its config "
            "to 0 (drop_path_rate)"
        )


def _compare(output: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    if output.shape != expected.shape:
        raise ProbeError(f"{why} (shape {tuple(output.shape)}, not {tuple(expected.shape)})")
    change = (output - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
    if not bool(change <= _NOISE):
        raise ProbeError(f"{why} (relative difference {float(change):.1e})")


def _run(
    model: nn.Module, inputs: dict[str, Any], peers: Peers, read: Read
) -> torch.Tensor:
    blocks = find_blocks(model)
    assert blocks is not None
    sharing = SharedItems(model, blocks, 0, len(block_list(model, blocks)), peers)
    torch.default_generator.manual_seed(0)
    with sharing:
        output = model(**inputs)
    if getattr(output, "hidden_states", None) is not None:
        raise ModelError(
            "it returns the hidden states of all its blocks (output_hidden_states), but each "
            "process has only its own tokens of them"
        )
    return read(output)


class _Whole:
    """:class:`Peers` of a single process with all tokens; records the inputs of attention."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.attended: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hidden: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """Output of the blocks for all tokens, after a forward."""
        assert self.hidden is not None
        return self.hidden

    def attend(self, layout: ContextLayout) -> Attend:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Any,
                   **options: Any) -> torch.Tensor:  # fmt: skip
            if key.shape != value.shape:
                raise ModelError("its keys and values differ in shape")
            if not query.shape[2] == key.shape[2] == layout.length:
                raise ModelError(
                    f"{query.shape[2]} rows attend to {key.shape[2]} keys of {layout.length} tokens"
                )
            self.attended.append((key, value))
            return attention(query, key, value, masks, **options)[0]

        return attend

    def gather(self, local: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        self.hidden = local
        return local


class _Part:
    """:class:`Peers` of one of several processes; other processes' tokens come from a record."""

    size = _PROCESSES

    def __init__(self, whole: _Whole, rank: int) -> None:
        self.rank, self.calls, self._whole = rank, 0, whole

    def _among(self, whole: torch.Tensor, local: torch.Tensor, layout: Any, dim: int):
        ((start, stop),) = layout.ranges[self.rank]
        shards = [whole.narrow(dim, 0, start), local,
                 whole.narrow(dim, stop, layout.length - stop)]  # fmt: skip
        return torch.cat(shards, dim)

    def attend(self, layout: ContextLayout) -> Attend:
        everyone = tuple(attended for ranges in layout.ranges for attended in ranges)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Any,
                   **options: Any) -> torch.Tensor:  # fmt: skip
            if query.shape[2] != layout.sizes[self.rank]:
                raise ModelError(f"{query.shape[2]} rows for {layout.sizes[self.rank]} "
                                       "tokens of a process")  # fmt: skip
            recorded = self._whole.attended[self.calls]
            self.calls += 1
            key, value = (
                self._among(attended, local, layout, 2)
                for attended, local in zip(recorded, (key, value), strict=True)
            )
            masks = local_masks(tuple(masks), layout.ranges[self.rank], everyone)
            return attention(query, key, value, masks, **options)[0]

        return attend

    def gather(self, local: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        return self._among(self._whole.tokens, local, layout, 1)
