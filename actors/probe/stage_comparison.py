"""Comparison of a model with its stages: results must be bit-identical, or the model cannot be cut.

Both evaluation and training (if the model trains) are compared, because skipped layers and draws
outside the blocks only occur in training. Random decisions are forced
(:mod:`raymm.actors.probe.draws`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.cut import CutInfo, Passage, ghost_parameter, prune
from raymm.actors.modules.draws import BlockDraws, Draws
from raymm.actors.probe.draws import extreme_draws
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.quota.generators import (
    generator_state,
    generators_kept,
    host_states,
    seed_generators,
)
from raymm.errors import USER_CODE_RAISES, ForwardLeft, NotRunError, PlanError, ProbeError
from raymm.kernels.shared_draws import Cut, Grid, SharedDraws

# Seeds of forced random decisions, to observe them: with three blocks that are each skipped in
# every second forward, the chance that no skip occurs is 1 in 2**24.
_SEEDS_TO_SEE = range(8)
# Seeds to compare; of the later ones only those that skip blocks.
_SEEDS_TO_COMPARE = range(5)
_SEEDS_IN_ANY_CASE = range(2)
_CURE = "give it one stage (pp 1)"

Names = Collection[str]
_Handed = tuple[torch.Tensor, ...]
Run = Callable[[nn.Module, bool], torch.Tensor]
"""``run(model, first)``: runs a forward and returns its output, or, for a stage, its last value.
``first`` selects the real inputs rather than those of later stages."""


class Forward(NamedTuple):
    """Result of a complete forward: its output, the called blocks in order, and their output
    shapes."""

    output: torch.Tensor
    called: tuple[int, ...]
    tuple_length: int
    shapes: dict[int, torch.Size]


def uncut_forward(model: nn.Module, blocks: str, run: Run, seed: int) -> Forward:
    """Run a copy of the model in one process, with all random numbers from ``seed``."""
    called: list[int] = []
    lengths: list[int] = []
    shapes: dict[int, torch.Size] = {}

    def note(index: int, output: Any) -> None:
        called.append(index)
        lengths.append(len(output) if isinstance(output, tuple | list) else 0)
        hidden = output[0] if lengths[-1] else output
        if isinstance(hidden, torch.Tensor):
            shapes[index] = hidden.shape

    replica = trial_copy(model)  # some models store tensors of their last forward
    listed = block_list(replica, blocks)
    for index, block in enumerate(listed):
        block.register_forward_hook(lambda _, __, output, index=index: note(index, output))
    with generators_kept():
        output = _drawing(replica, listed, run, True, seed)
    return Forward(output, tuple(called), lengths[0] if lengths else 0, shapes)


def skips_blocks(model: nn.Module, blocks: str, run: Run) -> bool:
    """Return True if a model's forward, in its current mode, may skip blocks.

    Raises:
        NotRunError: the model does not run.
    """
    total = len(block_list(model, blocks))
    try:
        if not _draws(model, run):
            return False
        with extreme_draws():
            forwards = (uncut_forward(model, blocks, run, seed) for seed in _SEEDS_TO_SEE)
            return any(len(forward.called) < total for forward in forwards)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise _not_run(model, error) from error


class TrainingDraws(NamedTuple):
    """Random decisions of a training forward that processes with parts of a batch cannot share.

    Attributes:
        skips_blocks: True if a forward may skip blocks.
        on_host: True if a forward draws numbers with NumPy or Python.
        on_host_in_blocks: True if a block does.
        refused: reason why draws for some rows of a batch may differ from those of one process, or
            empty.
        drawn: True if a forward draws any numbers.
    """

    skips_blocks: bool = False
    on_host: bool = False
    on_host_in_blocks: bool = False
    refused: str = ""
    drawn: bool = False


def training_draws(
    model: nn.Module, blocks: str | None, run: Run, two_rows: Run | None = None,
    tokens: int | None = None,
) -> TrainingDraws:  # fmt: skip
    """Return the random decisions of a model in training mode.

    ``two_rows`` calls the model with two rows of ``tokens``; None if rows are not split.

    Raises:
        NotRunError: the model does not run.
    """
    try:
        if not _draws(model, run):
            return TrainingDraws()
        with extreme_draws():  # some draws only happen with a probability
            anywhere, inside = (
                # Twice, because threads of libraries draw numbers, too.
                any(
                    _draws_on_host(model, run, names, seed)
                    and _draws_on_host(model, run, names, seed) for seed in _SEEDS_TO_SEE
                )
                for names in ("", blocks)
            )
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise _not_run(model, error) from error
    skips = blocks is not None and skips_blocks(model, blocks, run)
    refused = _refused_shape(model, two_rows, tokens)
    return TrainingDraws(skips, anywhere, inside, refused, drawn=True)


def _refused_shape(model: nn.Module, two_rows: Run | None, tokens: int | None) -> str:
    """Return why draws for two rows of four cannot be sliced, or an empty string.

    Two rows, unlike one, distinguish a row dimension from a dimension of 1 that all rows share.
    """
    if two_rows is None:
        return ""
    grid = Grid(Cut.from_range(0, 2, 4), None if tokens is None else Cut.uncut(tokens))
    try:
        with generators_kept(), torch.no_grad(), SharedDraws(grid):
            two_rows(trial_copy(model), True)
    except PlanError as error:
        return str(error)
    except USER_CODE_RAISES:
        pass  # inputs cannot be doubled in the first dimension: left to the first step
    return ""


def _draws_on_host(model: nn.Module, run: Run, blocks: str | None, seed: int) -> bool:
    """Return True if a forward (``blocks`` empty) or its blocks draw with NumPy or Python."""
    if blocks is None:
        return False
    replica, states, drawn = trial_copy(model), [], []
    for module in block_list(replica, blocks) if blocks else [replica]:
        module.register_forward_pre_hook(lambda *_: states.append(host_states()))
        module.register_forward_hook(lambda *_: drawn.append(host_states() != states.pop()))
    with generators_kept():
        seed_generators(seed)
        run(replica, True)
    return any(drawn)


def compare_stages(
    model: nn.Module, blocks: str, run: Run, trains: bool, relayed: tuple[int, ...] = ()
) -> CutInfo:
    """Cut a model, in eval mode, into a first, a middle and a last stage and return the cut.

    Args:
        blocks: dotted name of its list of at least two blocks.
        trains: True if the model is going to be in training mode.
        relayed: blocks whose outputs are sent to later stages.

    Raises:
        ProbeError: the stages do not give the same bits as the complete model.
    """
    stages = _Stages(model, blocks, run, relayed)
    stages.compare(0)
    if trains:
        stages.train()
        stages.compare(0)
        if _draws(model, run):
            with extreme_draws():
                for seed in _SEEDS_TO_COMPARE:
                    stages.compare(seed, only_skips=seed not in _SEEDS_IN_ANY_CASE)
    return stages.info()


def _draws(model: nn.Module, run: Run) -> bool:
    """Return True if a forward draws random numbers."""
    with generators_kept():
        seed_generators(0)
        states = generator_state(), host_states()
        run(trial_copy(model), True)
        return (generator_state(), host_states()) != states


def _drawing(
    stage: nn.Module, listed: nn.ModuleList, run: Run, first: bool, seed: int
) -> torch.Tensor:
    """Run a forward with the random numbers that a stage draws."""
    draws = Draws(seed)
    blocks = BlockDraws(listed)
    blocks.use(draws)
    draws.enter("module")
    try:
        return run(stage, first)
    finally:
        blocks.remove()


def _not_run(model: nn.Module, error: BaseException) -> NotRunError:
    mode = " in training" if model.training else ""
    return NotRunError(
        f"{type(model).__name__} does not run as stages run it{mode}{because(error)}; a "
        "language model must take inputs_embeds and give logits, an encoder features"
    )


class _Stages:
    """A model and its stages."""

    def __init__(
        self, model: nn.Module, blocks: str, run: Run, relayed: tuple[int, ...]
    ) -> None:
        self._name, self._relayed = type(model).__name__, relayed
        self._model, self._blocks, self._run = model, blocks, run
        total = len(block_list(model, blocks))
        self._bounds = [0, 1, total - 1, total] if total > 2 else [0, 1, 2]
        self._outer = frozenset(
            n for n, _ in model.named_parameters() if not n.startswith(blocks + ".")
        )
        self._used = [frozenset[str]() for _ in self._bounds[1:]]
        self._length: int | None = None
        self._stages: list[tuple[nn.Module, Passage]] = []

    def train(self) -> None:
        """Switch to training forwards."""
        self._model.train()
        for stage, _ in self._stages:
            stage.train()

    def compare(self, seed: int, only_skips: bool = False) -> None:
        """Compare one forward with the random numbers of a seed; optionally only if it skips
        blocks."""
        try:
            uncut = uncut_forward(self._model, self._blocks, self._run, seed)
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise _not_run(self._model, error) from error
        self._check_calls(uncut.called)
        total = self._bounds[-1]
        if not uncut.called or only_skips and len(uncut.called) == total:
            return
        if self._length is None:
            self._length = uncut.tuple_length
            self._stages = [self._stage(lo, hi) for lo, hi in self._between]
        with generators_kept():
            output = self._run_stages(seed)
        same = output.shape == uncut.output.shape and torch.allclose(
            output, uncut.output, rtol=0, atol=0, equal_nan=True
        )
        if not same:
            raise self._error(
                "something besides the hidden state flows from block to block, and its stages "
                "differ from the whole"
            )

    @property
    def _between(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds, self._bounds[1:], strict=False))

    def _error(self, why: str) -> ProbeError:
        mode = " in training" if self._model.training else ""
        return ProbeError(f"{self._name} cannot be cut between its blocks{mode}: {why}; {_CURE}")

    def _check_calls(self, called: tuple[int, ...]) -> None:
        times = [called.count(index) for index in range(self._bounds[-1])]
        if max(times) > 1 or not self._model.training and not times[0]:
            wrong = max(range(len(times)), key=times.__getitem__) if max(times) > 1 else 0
            which = f"block {wrong}" if wrong else "its first block"
            raise ProbeError(
                f"{self._name} runs {which} {times[wrong]} times per forward, not once; {_CURE}"
            )

    def _info(self, first: Names, middle: Names, last: Names) -> CutInfo:
        return CutInfo(
            self._blocks, self._length or 0, frozenset(first), frozenset(middle), frozenset(last),
            self._relayed,
        )

    def _stage(self, lo: int, hi: int) -> tuple[nn.Module, Passage]:
        assert self._length is not None  # set by the first complete forward
        everywhere = self._info(self._outer, self._outer, self._outer)
        stage = prune(trial_copy(self._model), everywhere, lo, hi)
        return stage, Passage(stage, everywhere, lo, hi)

    def _run_stages(self, seed: int) -> torch.Tensor:
        hidden: torch.Tensor | None = None
        handed: _Handed = ()
        try:
            for number, (stage, passage) in enumerate(self._stages):
                leaves = [t.detach().requires_grad_() for t in handed]
                received, relays = leaves[0] if leaves else None, leaves[1:]
                listed = block_list(stage, self._blocks)
                try:
                    with passage.open(received, "its forward", relays):
                        hidden = _drawing(stage, listed, self._run, not number, seed)
                        handed = (hidden,)
                except ForwardLeft as cut:
                    hidden, handed = cut.value, (cut.value, *cut.relays)
                self._used[number] |= self._reached(stage, handed)
        except ProbeError:
            raise
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise self._error(
                "it reads more block outputs than the hidden state that one stage sends to the "
                "next, such as the outputs of all blocks (for feature maps), or their sizes"
                f"{because(error)}"
            ) from error
        assert hidden is not None  # at least two stages
        return hidden

    def _reached(self, stage: nn.Module, handed: _Handed) -> frozenset[str]:
        """Return the parameters outside the blocks that get a gradient."""
        stage.zero_grad()
        # Varied weights: a plain sum has zero gradient through a normalisation.
        terms = [
            (t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum()
            for t in handed if t.requires_grad
        ]  # fmt: skip
        if terms:
            sum(terms[1:], terms[0]).backward()
        return self._outer & {n for n, p in stage.named_parameters() if p.grad is not None}

    def info(self) -> CutInfo:
        """Return the cut, from the gradients and from what stages cannot run without.

        Raises:
            ProbeError: stages with only their own parameters give other results.
        """
        self._model.eval()
        expected = uncut_forward(self._model, self._blocks, self._run, 0).output
        everywhere = self._info(self._outer, self._outer, self._outer)
        unreached = self._outer.difference(*self._used)
        received: _Handed = ()
        owned = []
        for number, reached in enumerate(self._used):
            handed = self._alone(everywhere, number, received)
            owned.append(
                reached.union(self._read(everywhere, number, received, handed, unreached))
            )
            received = handed
        middle = owned[1] if len(owned) > 2 else frozenset()
        info = self._info(owned[0], middle, owned[-1])
        output, *_ = functools.reduce(
            lambda handed, number: self._alone(info, number, handed), range(len(owned)), ()
        )
        if not torch.allclose(output, expected, rtol=0, atol=0, equal_nan=True):
            raise self._error("with only the parameters that they use, its stages differ from it")
        return info

    def _alone(
        self, info: CutInfo, number: int, received: _Handed, without: Names = frozenset(),
    ) -> _Handed:
        """Return the output of a stage with only its own parameters, except ``without``."""
        lo, hi = self._between[number]
        stage = prune(trial_copy(self._model), info, lo, hi)
        tied = {id(p) for n, p in stage.named_parameters() if n in without}
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            if id(parameter) in tied:
                ghost_parameter(stage, name)
        passage, listed = Passage(stage, info, lo, hi), block_list(stage, self._blocks)
        # With autograd, like the complete forward: some attention gives other bits without.
        leaves = [t.requires_grad_() for t in received]
        leaf, relays = leaves[0] if leaves else None, leaves[1:]
        with generators_kept():
            try:
                with passage.open(leaf, self._name, relays):
                    return (_drawing(stage, listed, self._run, not number, 0).detach(),)
            except ForwardLeft as cut:
                return tuple(t.detach() for t in (cut.value, *cut.relays))

    def _read(
        self, everywhere: CutInfo, number: int, received: _Handed, handed: _Handed,
        candidates: Names,
    ) -> Names:  # fmt: skip
        """Return the candidate parameters that change a stage's output.

        Some get no gradient, such as frozen position tables.
        """

        def differs(names: Names) -> bool:
            try:
                without = self._alone(everywhere, number, received, names)
            except USER_CODE_RAISES:  # does not run without them
                return True
            return not all(map(torch.equal, without, handed))

        if not candidates or not differs(candidates):
            return frozenset()
        return frozenset(n for n in candidates if differs({n})) or frozenset(candidates)
