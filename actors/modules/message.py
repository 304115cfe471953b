"""Messages between stages.

Only the first stage of a module reads data and, in the language model, runs the merge policy.
Values that later stages need (mask, labels, integer inputs) are sent with the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.draws import Draws
from raymm.actors.modules.noise import SampleSeeds
from raymm.scheduler.graph.sample_ranges import Range, rows_of

# Name of the hidden state in messages that also have ports.
HIDDEN = ""
# Side tensor (B, T) bool: tokens that count for routers.
ROUTED_TOKENS = "routed_tokens"


class Routed(NamedTuple):
    """Router decisions of a stage's layers for one microbatch.

    Attributes:
        loads: by name of a layer's experts, (E,) int64: number of tokens routed to each.
        counts: (E,) float32: how often each expert is among a token's top choices, over all layers
            of the stage, as counted by the routers' loss; None for a model without such a loss.
    """

    loads: Mapping[str, torch.Tensor]
    counts: torch.Tensor | None = None


# By source number: the sum of cross entropies (scalar on the device) and the number of labels.
SourceSums = dict[int, tuple[torch.Tensor, int]]
# Text entry (B,) int64: source numbers of the samples, if there are several sources.
SOURCES = "sources"


class Message(NamedTuple):
    """One microbatch's data on one edge.

    ``loss``, ``routed``, ``by_source`` and ``scores`` are results of the step and are not sent.

    Attributes:
        tensors: floating-point tensors that gradients may flow back through, in fixed order.
        side: named tensors without gradient, of any dtype, that later stages need (attention mask,
            labels, position ids, input shapes).
        names: names of ``tensors``, if the reader needs them: outputs of a module, or, within a
            module, the hidden state and ports (tensors of other modules that layers read).
        loss: scalar contribution of the stage to the step's loss.
        by_source: the undivided loss per source, if samples have sources.
        scores: (B,), log-probabilities of answer pairs, or next tokens (decoding).
    """

    tensors: tuple[torch.Tensor, ...]
    side: dict[str, torch.Tensor]
    names: tuple[str, ...] = ()
    loss: torch.Tensor | None = None
    routed: Routed | None = None
    by_source: SourceSums = {}
    scores: torch.Tensor | None = None

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors at which a backward may start."""
        return self.tensors if self.loss is None else (*self.tensors, self.loss)


class Decode(NamedTuple):
    """Decoding step, in which a language model predicts the next token of each row's text.

    Attributes:
        first: True if the microbatch is a prompt; otherwise each row is the last token of a text.
        ended: numbers of texts whose keys and values can be freed.
    """

    texts: tuple[int, ...]
    first: bool
    ended: tuple[int, ...] = ()


class MicrobatchContext(NamedTuple):
    """Properties of the step that a stage may use in addition to its inputs.

    Attributes:
        label_tokens: number of label tokens, or of answer pairs, in the *entire* step. The loss is
            a sum divided by this number, for any number of microbatches.
        draws: random number streams; None leaves the generators unchanged.
        scales: by module, factor of the sum of its samples' losses.
        samples: samples of the stage; empty for all of the microbatch.
        offsets: for modules with a variable number of rows per sample: first row of each sample,
            then the total number of rows.
        seeds: seeds of sample noise; None if there is no noise.
        reference: True to compute reference log-probabilities of the labels, without adapters.
        router_loss: True to add the model's loss for its routers.
        sample_count: number of the microbatch's samples, 0 if unknown.
        training: False in evaluation and text generation.
    """

    label_tokens: int
    microbatch: int = 0
    sample_ids: tuple[str, ...] = ()
    draws: Draws | None = None
    scales: Mapping[str, float] = {}
    samples: tuple[Range, ...] = ()
    offsets: Mapping[str, Sequence[int]] = {}
    decode: Decode | None = None
    seeds: SampleSeeds | None = None
    reference: bool = False
    router_loss: bool = False
    router_counts: tuple[float, ...] | None = None
    sample_count: int = 0
    training: bool = True

    def own_rows(self, module: str) -> Range:
        """Return the (contiguous) rows of the stage's samples within the module's microbatch rows.
        """
        first, last = self.samples[0], self.samples[-1]
        return rows_of(Range(first.lo, last.hi), self.offsets.get(module))

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Names of the stage's samples."""
        if not self.samples:
            return self.sample_ids
        return tuple(name for span in self.samples for name in self.sample_ids[slice(*span)])

    def enter(self, place: str) -> None:
        """Switch to the random number stream of a place of the module."""
        if self.draws is not None:
            self.draws.enter(place)


class StageModule(nn.Module):
    """Interface of a stage for the executor. A stage may draw random numbers at the places passed
    to ``context.enter``, unless its attribute ``may_draw`` is False. Its attribute ``is_shared`` is
    True if it computes only a part of the results."""

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """Run one microbatch; the message includes the loss, if the stage computes one.

        Args:
            received: messages by producer: stage name, or module name for other modules.
        """
        raise NotImplementedError

    def split_items(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], message: Message
    ) -> list[Message]:
        """Return the messages of several microbatches, given the message of one forward for all of
        their items."""
        raise NotImplementedError


# Maps the return value of a forward to the part that other modules read, as one tensor.
Read = Callable[[Any], torch.Tensor]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the feature tensor of an encoder output. This is the output itself, its
    ``last_hidden_state`` or only feature map, or a tuple's first entry. Raise a ``TypeError`` if
    there is no tensor."""
    if isinstance(output, torch.Tensor):
        return output
    if getattr(output, "last_hidden_state", None) is not None:
        return output.last_hidden_state
    maps = getattr(output, "feature_maps", None)  # backbones have feature maps
    if maps is not None and len(maps) == 1:
        return maps[0]
    if isinstance(output, tuple | list) and isinstance(output[0], torch.Tensor):
        return output[0]
    several = "" if maps is None else f", with {len(maps)} feature maps"
    raise TypeError(
        f"no tensor of features in an encoder output of type {type(output).__name__}{several}; a "
        "postprocess_module_callback can pick one"
    )
