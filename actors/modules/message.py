"""What a stage hands to the next one.

Only the first stage of a module reads data, and the merge policy runs once, on the language model's
first stage: what later stages need (mask, labels, integer inputs) travels with the hidden state, so
a user's callback may do what it likes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.draws import Draws
from raymm.actors.modules.noise import SampleSeeds
from raymm.scheduler.graph.sample_ranges import Range, rows_of

# The name of the hidden state beside ports.
HIDDEN = ""
# What stages hand one another of the tokens that count for routers: (B, T) bool.
ROUTED_TOKENS = "routed_tokens"


class Routed(NamedTuple):
    """What the routers of a stage's layers decided for one microbatch.

    Attributes:
        loads: by name of a layer's experts, (E,) int64: tokens that each of them got.
        counts: (E,) float32: how often each is among the likeliest of a token, in all layers of the
            stage, as the routers' loss counts; None of a model without such a loss.
    """

    loads: Mapping[str, torch.Tensor]
    counts: torch.Tensor | None = None


# By number of a source: a sum of cross entropies, a scalar on the device, and over how many labels.
SourceSums = dict[int, tuple[torch.Tensor, int]]
# Of a microbatch's text: (B,) int64, numbers of its samples' sources, where there are several.
SOURCES = "sources"


class Message(NamedTuple):
    """One microbatch's data on one edge.

    Attributes:
        tensors: floating-point tensors gradients may flow back through, in fixed order.
        side: named tensors without gradient that later stages need (attention mask,
            labels, position ids, input shapes), any dtype.
        names: of ``tensors``, where who reads them knows them by names: outputs of a module, or,
            within one, the hidden state and what else layers read of other modules (ports).
        loss: what the stage computes of the step's loss, a scalar; it stays where it is. Of a step
            that writes text, the next token.
        routed: of a mixture of experts; it stays where it is, too.
        by_source: where samples say which source they are of, what the loss is the sum of before it
            is divided; it stays where it is.
        scores: (B,), of pairs of answers the rows' log-probabilities; they stay there, too.
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
        """All that a backward may begin at."""
        return self.tensors if self.loss is None else (*self.tensors, self.loss)


class Decode(NamedTuple):
    """What every stage of a language model is told of a step that gives the next token of texts.

    Attributes:
        texts: number of the text of each of the microbatch's rows.
        first: whether the microbatch is the beginning of one (a prompt); else each row is the token
            that came last.
        ended: numbers of texts whose keys and values nobody needs any more.
    """

    texts: tuple[int, ...]
    first: bool
    ended: tuple[int, ...] = ()


class MicrobatchContext(NamedTuple):
    """What a stage may know of the step besides its inputs.

    Attributes:
        label_tokens: number of label tokens, or of pairs of answers, in the *whole* step; the loss
            is the sum over these divided by this, whatever the microbatching.
        microbatch: number of the microbatch within the step.
        sample_ids: names of the microbatch's samples, for error messages.
        draws: where random numbers come from; None: from wherever the generators are.
        scales: by module, what the sum of its samples' losses is multiplied with.
        samples: that the stage works on; without any, all of the microbatch.
        offsets: by module that has any number of rows of a sample, each sample's first row, and
            behind the last one the number of rows.
        decode: of a step that writes texts, which.
        seeds: that noise of samples follows from; None where none is drawn.
        reference: the log-probabilities of the rows' labels are asked for, without adapters.
        router_loss: whether the loss is to have what the model adds to it for its routers.
        router_counts: as of :class:`raymm.actors.executor.step_meta.StepMeta`.
        sample_count: number of the microbatch's samples, 0 if unknown.
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

    def own_rows(self, module: str) -> Range:
        """Where the rows that a module has of the stage's samples lie among all that it has of the
        microbatch; next to one another, as samples between them have none."""
        first, last = self.samples[0], self.samples[-1]
        return rows_of(Range(first.lo, last.hi), self.offsets.get(module))

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Names of the stage's samples."""
        if not self.samples:
            return self.sample_ids
        return tuple(name for own in self.samples for name in self.sample_ids[slice(*own)])

    def enter(self, place: str) -> None:
        """What is drawn from now on belongs to this place of the module."""
        if self.draws is not None:
            self.draws.enter(place)


class StageModule(nn.Module):
    """What the executor needs of a stage.

    A stage without an attribute ``may_draw`` may draw random numbers, at the places that it says
    to ``context.enter``. A stage with a true attribute ``is_shared`` computes a part of what one
    process would, as several processes share its microbatches or its parameters' products.
    """

    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """One microbatch.

        Args:
            inputs: of a stage that reads data.
            received: messages by producer: names of stages, or of modules where the producer is
                another module.
            context: what else it may know of the step.

        Returns:
            What it hands on, and the loss that it computes.
        """
        raise NotImplementedError


# Of what a module's forward returned, what others read, as one tensor.
Read = Callable[[Any], torch.Tensor]


def first_tensor(output: Any) -> torch.Tensor:
    """The tensor itself, ``last_hidden_state`` or the only feature map of a model output, or a
    tuple's first entry.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(output, torch.Tensor):
        return output
    if getattr(output, "last_hidden_state", None) is not None:
        return output.last_hidden_state
    maps = getattr(output, "feature_maps", None)  # a backbone's
    if maps is not None and len(maps) == 1:
        return maps[0]
    if isinstance(output, tuple | list) and isinstance(output[0], torch.Tensor):
        return output[0]
    several = "" if maps is None else f", with {len(maps)} feature maps"
    raise TypeError(
        f"no tensor of features in an encoder output of type {type(output).__name__}{several}; a "
        "postprocess_module_callback can pick one"
    )
