"""Language model stages: embedding and merge, blocks, head and loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from raymm.actors.adapters.lora import disable_dropout
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.experts.routing import Routing
from raymm.actors.modules.cut import CutInfo, stage_parameters
from raymm.actors.modules.merge import IGNORE_INDEX, CrossAttend, MergePolicy, merge_rows
from raymm.actors.modules.message import (
    ROUTED_TOKENS,
    Decode,
    Message,
    MicrobatchContext,
    SourceSums,
)
from raymm.actors.modules.message_samples import SHAPE
from raymm.actors.modules.packed_rows import pack_rows
from raymm.actors.modules.token_layout import MaskPolicy
from raymm.actors.sharding.sample_rows import text_of_samples
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.sharding.tensor_shard import shard_module
from raymm.actors.stages.attention_arguments import LONGEST, MaskedAttention, ModelMasks, Text
from raymm.actors.stages.item_shares import DRAWN_ROWS, RowShares, sample_rows, text_grid
from raymm.actors.stages.labels import PAIR, Labelled, with_sources
from raymm.actors.stages.stage import Call, PartForward, Stage
from raymm.actors.stages.stage_inputs import for_model, from_side, from_stages, message_of
from raymm.actors.stages.texts.decoding import KeyValueCaches, apart_if_need_be, likeliest
from raymm.actors.stages.token_loss import TokenLoss, token_loss_sum
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ForwardLeft, ModelError
from raymm.kernels.collectives.gather import CONTRIBUTOR
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.cross_entropy import (
    token_cross_entropy_sum,
    vocabulary_parallel_cross_entropy_sum,
)
from raymm.kernels.hf.text_masks import no_packed_rows
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.preference import PreferenceLoss
from raymm.kernels.shared_draws import Grid, set_grid
from raymm.scheduler.graph.module_graph import Port

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"
_READ_BY_MERGE = frozenset({"input_ids", "labels", "sample_index", "encoder_kinds"})
Totals = tuple[torch.Tensor | None, SourceSums, torch.Tensor | None]
"""The undivided loss, the part of each source, and the rows' log-probabilities."""


@dataclass(frozen=True)
class LanguageSpec:
    """Description of a causal language model; a rank builds its part from this data.

    Attributes:
        mask: mask policy for the merged tokens; None for the model's own causal mask.
        encoders: names of all encoders; the mask numbers their kinds from 1 in this order.
        packing: run a microbatch's rows as one row without padding; each row is a document.
        mixers: classes of layers that mix tokens by other means than attention and therefore get
            one document per row (:mod:`raymm.kernels.hf.document_rows`).
        ports: outputs of the merge policy that layers of later stages read.
        preference: the loss, if rows are pairs of answers; None for cross entropy.
        token_loss: custom loss in place of the cross entropy of tokens.
    """

    name: str
    source: ModuleSource
    num_blocks: int
    merge: MergePolicy
    cut: CutInfo | None = None
    mask: MaskPolicy | None = None
    encoders: tuple[str, ...] = ()
    packing: bool = False
    mixers: frozenset[str] = frozenset()
    ports: tuple[Port, ...] = ()
    preference: PreferenceLoss | None = None
    token_loss: TokenLoss | None = None
    mixture: Mixture | None = None

    @property
    def num_layers(self) -> int:
        return self.num_blocks


@dataclass(frozen=True, kw_only=True)
class TextCall(Call):
    """Call of a stage's part of a language model.

    Attributes:
        around: context manager of the forward.
        length: number of tokens of a row.
        counted: (B, T) bool, the tokens that count for routers; None for all.
        labelled: positions whose logits are needed; None before the last stage.
        reference: (B,) reference log-probabilities of answer pairs.
    """

    around: AbstractContextManager[None]
    length: int
    counted: torch.Tensor | None
    labelled: Labelled | None
    reference: torch.Tensor | None


class LanguageStage(Stage):
    """Blocks [lo, hi) of a language model, with embeddings (first stage) or head and loss (last).

    :class:`Objective` computes the loss, :class:`ModelMasks` the layers' masks,
    :class:`RowShares` the process's rows, and :class:`Routing` the routers' loss.
    """

    module: PreTrainedModel

    def __init__(self, spec: LanguageSpec, lo: int, hi: int, module: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.module = cast("PreTrainedModel", module)
        self.first, self.last = lo == 0, hi == spec.num_blocks
        uncut, ending = self.first and self.last, self.module if self.last else None
        self._routing = Routing(module, spec.mixture)
        self._forward = PartForward(spec.name, module, None if uncut else spec.cut, lo, hi)
        self._caches = KeyValueCaches(module, lo, hi)
        self._rows = RowShares(PAIR if spec.preference else 1)
        if (preference := spec.preference) is None:
            self._objective = Objective(ending, spec.token_loss)
        else:
            self._objective = PreferenceObjective(ending, preference, self._rows)
            if preference.disable_dropout:
                disable_dropout(self.module)
        crosses = isinstance(spec.merge, CrossAttend) and any(
            lo <= layer < hi for port in spec.ports for layer in port.layers
        )
        attention = ModelMasks if spec.mask is None and not spec.packing else MaskedAttention
        self._attention = attention(
            self.module, self._forward.blocks, spec.mask, spec.encoders, spec.mixers, crosses
        )

    def share_tokens(self, exchange: Exchange) -> None:
        """Split every sample's tokens over a group of processes (context parallelism)."""
        self.is_shared = True
        self._attention = self._attention.split(exchange)
        self._objective.share_tokens(exchange)

    def share_samples(self, exchange: Exchange) -> None:
        """Split every microbatch's samples over a group of processes, which get the same inputs.
        Losses and parameter gradients are partial sums."""
        self.is_shared = True
        self._rows.share(exchange)

    def shard_tensors(self, plans: Mapping[str, TensorPlan], group: TensorGroup) -> None:
        """Shard the parameters over a tensor-parallel group, by the plan under ``"module"``."""
        plan, self.is_shared = plans["module"], True
        shard_module(self.module, plan, group)
        if (vocabulary := plan.vocabulary(group.rank)) is not None:
            self._objective.shard_vocabulary(vocabulary[0], group)

    def detach(self) -> None:
        """Restore the module: the single-process reference builds a stage per forward."""
        for attached in (self._forward, self._routing, self._objective, self._attention):
            attached.detach()

    def merge_by(self, merge: MergePolicy) -> None:
        """Merge features of encoders by another policy than the spec's."""
        self.spec = replace(self.spec, merge=merge)

    @classmethod
    def build(cls, spec: LanguageSpec, lo: int, hi: int) -> LanguageStage:
        """Build only the parts that blocks [lo, hi) need."""
        stage_part = None
        if lo > 0 or hi != spec.num_blocks:
            assert spec.cut is not None  # a module without cut is one stage
            stage_part = Part(spec.cut, lo, hi)
        return cls(spec, lo, hi, spec.source.build(stage_part))

    @apart_if_need_be
    def run(
        self,
        inputs: dict[str, Any] | None,
        received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        """Run one microbatch.

        Args:
            inputs: text tensors and ``sample_index`` (first stage); for answer pairs, the reference
                log-probability of each row as :data:`REFERENCE`, (B,) fp32 (last stage).
            received: messages by producing module (first stage) or stage.

        Returns:
            Hidden state, with merged mask or token layout and targets as side tensors. On the last
            stage the loss, the next tokens (decoding), or (B,) log-probabilities (references).
        """
        return self._routing.into(super().run(inputs, received, context), context)

    def receive(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> TextCall:
        inputs = with_sources(inputs, rows=self.spec.preference is not None)
        reference = inputs.pop(REFERENCE, None)
        text = self._begin(inputs, received, context) if self.first else self._resume(received)
        return self._call(text, reference, context)

    def forward(self, call: TextCall, context: MicrobatchContext) -> torch.Tensor:
        """Return the logits; the head runs on labelled positions only."""
        with (
            self._objective.only(call.labelled), call.around, self._routing.noted(call.counted),
            self._caches.arguments(context.decode, call.length) as caching,
        ):
            inputs = self._with_caches(call.inputs, context.decode, caching)
            return self._forward(call.hidden, context, call.relays, **inputs).logits

    def pass_on(self, left: ForwardLeft, call: TextCall) -> Message:
        hidden, side = self._attention.resized(left.value, call.side)
        return message_of(hidden, call.ports, side)

    def outputs(
        self, output: torch.Tensor, call: TextCall, context: MicrobatchContext
    ) -> Message:
        """Return a message with the loss, the next tokens, or the rows' log-probabilities."""
        assert call.labelled is not None  # earlier stages raise ForwardLeft
        return self._objective.outcome(call.labelled, output, context, call.reference)

    def _begin(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> Text:
        """Merge text and features; return this process's rows."""
        if context.samples:
            inputs = text_of_samples(inputs, context)
            set_grid(Grid(sample_rows(context, "", len(inputs["input_ids"]))))
        context.enter("merge")
        side = self._merge(inputs, received, context)
        longest = self._longest(side, context)
        side, drawn = self._rows.take(side, self.spec.packing)
        ports = self._attention.ports(self._ports(side), side)
        if self.spec.packing:
            side = pack_rows(side, side.pop("token_layout"))
        embeds = side.pop("inputs_embeds")
        return Text(embeds.device, side, ports, embeds=embeds, drawn=drawn, longest=longest)

    def _resume(self, received: dict[str, Message]) -> Text:
        """Return the text as the previous stage sent it."""
        hidden, side, ports = from_stages(received, self.spec.name)
        drawn, longest = side.pop(DRAWN_ROWS, None), side.pop(LONGEST, None)
        return Text(hidden.device, side, ports, hidden, drawn=drawn, longest=longest)

    def _call(
        self, text: Text, reference: torch.Tensor | None, context: MicrobatchContext
    ) -> TextCall:
        """Return the model's call for this process's tokens."""
        text = self._attention.prepare(text)
        side, embeds, device = text.side, text.embeds, text.device
        side |= {
            name: value for name, value in ((DRAWN_ROWS, text.drawn), (LONGEST, text.longest))
            if value is not None
        }
        targets = on_host(side["targets"])
        set_grid(text_grid(context, targets.shape, text.drawn, text.tokens, self.spec.packing))
        if embeds is None:
            # As wide as the embeddings, which may be narrower than the hidden state (OPT-350m).
            width = cast(nn.Embedding, self.module.get_input_embeddings()).weight.shape[1]
            # Real zeros, not zero-stride ones: some models scale them in place (CTRL, GIT).
            embeds = torch.zeros(*targets.shape, width, device=device)
        shapes = {name: value for name, value in side.items() if name.startswith(SHAPE)}
        unread = self._attention.unread | {*shapes}
        arguments = self._attention.model_arguments({
            name: for_model(name, value, device)
            for name, value in side.items() if name not in unread
        } | from_side(shapes, device) | text.ports, self.spec.merge)
        return TextCall(
            hidden=text.hidden, inputs={"inputs_embeds": embeds, **arguments, **text.arguments},
            side=side, ports=text.ports, length=targets.shape[1], counted=side.get(ROUTED_TOKENS),
            around=self._around(text.longest, self._attention.separates(arguments)),
            labelled=self._objective.labels(targets, device, context), reference=reference,
        )

    @contextmanager
    def _around(self, longest: torch.Tensor | None, separates: bool) -> Iterator[None]:
        """Context manager of a forward: longest position, and rows that are not packed."""
        self._forward.rotary.set_longest(None if longest is None else int(on_host(longest)))
        try:
            with no_packed_rows(separates):
                yield
        finally:
            self._forward.rotary.set_longest(None)

    def _with_caches(
        self, inputs: dict[str, Any], decode: Decode | None, caching: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the model's arguments with key-value caches."""
        return {**inputs, **caching}

    def _longest(
        self, merged: dict[str, Any], context: MicrobatchContext
    ) -> torch.Tensor | None:
        """Return one more than the largest position, on the host, if rotary embeddings need it."""
        if not self._forward.rotary or context.decode is not None:
            return None
        positions = merged.get("position_ids")
        length = merged["targets"].shape[1] if positions is None else int(positions.max()) + 1
        return torch.tensor(length, device="cpu")

    def _ports(self, merged: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Remove and return the merged tensors that layers of any stage read.

        Raises:
            ModelError: another tensor has a gradient, which later stages could not return.
        """
        names = {*getattr(self.spec.merge, "ports", ()), *(port.name for port in self.spec.ports)}
        ports = {name: merged.pop(name) for name in sorted(names) if name in merged}
        for name, value in merged.items():
            lost = not self.last and name != "inputs_embeds" and isinstance(value, torch.Tensor)
            if lost and value.requires_grad:
                raise ModelError(
                    f"the merge policy returned {name} with a gradient, which later stages of "
                    f"{self.spec.name!r} read; list it in the policy's ports"
                )
        return ports

    def _merge(
        self, inputs: dict[str, Any], received: dict[str, Message], context: MicrobatchContext
    ) -> dict[str, Any]:
        """Return the merge policy's outputs that are not None, plus the label that each token
        predicts."""
        embeds = self.module.get_input_embeddings()(inputs["input_ids"])
        if context.decode is not None and not context.decode.first:
            return {"inputs_embeds": embeds, "targets": on_host(inputs["labels"])}
        labels = on_host(inputs["labels"]).clone()
        labels[:, 0] = IGNORE_INDEX
        labels = to_device(labels, inputs["labels"].device)
        features = {name: message.tensors[0] for name, message in received.items()}
        to_merge = {**inputs, "inputs_embeds": embeds, "labels": labels, **self._attention.kinds()}
        try:
            merged = merge_rows(self.spec.merge, features, to_merge)
        except ModelError as error:
            ids = context.own_ids
            if error.row is not None:
                ids = ids[error.row : error.row + 1]
            raise ModelError(f"{error} (sample id: {', '.join(ids) or 'unknown'})") from None
        merged |= self._attention.masks(merged)
        if self.spec.mixture is not None:
            merged[ROUTED_TOKENS] = self._routing.real(
                merged["attention_mask"], merged["labels"].shape, merged.get("token_layout")
            )
        labels = on_host(merged["labels"])
        merged["targets"] = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return {k: v for k, v in merged.items() if k not in _READ_BY_MERGE and v is not None}


def language_stage_parameters(spec: LanguageSpec, lo: int, hi: int) -> list[str]:
    """Return the parameter names, relative to the chain, that blocks [lo, hi) own."""
    skeleton = spec.source.skeleton()
    if lo == 0 and hi == spec.num_blocks:
        return [f"module.{name}" for name, _ in skeleton.named_parameters()]
    assert spec.cut is not None
    return [f"module.{name}" for name in stage_parameters(skeleton, spec.cut, lo, hi)]


class Objective:
    """Cross entropy of the labels; next tokens where a microbatch is decoded.

    The loss is the sum of cross entropies over label tokens divided by the number of label tokens
    of the entire step (``context.label_tokens``). The head runs only on labelled positions.

    Args:
        module: language model; None for stages before the last, which have no results.
        token_loss: custom loss in place of the cross entropy of tokens.

    Raises:
        TypeError: the model has no head.
    """

    def __init__(self, module: Any, token_loss: TokenLoss | None = None) -> None:
        self._token_loss = token_loss
        self._labelled: Labelled | None = None
        self._hook: Any = None
        self._vocabulary: tuple[int, TensorGroup | None] = (0, None)
        self._tokens: Exchange | None = None
        if module is None:
            return
        head = module.get_output_embeddings()
        if head is None:
            raise TypeError(f"{type(module).__name__} has no output embeddings (no lm_head)")
        self._hook = head.register_forward_pre_hook(self._keep_labelled_rows)

    def detach(self) -> None:
        """Remove the hook of the head."""
        if self._hook is not None:
            self._hook.remove()

    def shard_vocabulary(self, start: int, group: TensorGroup) -> None:
        """Set the first column of this process's logits; ``group`` has the other columns."""
        self._vocabulary = start, group

    def share_tokens(self, exchange: Exchange) -> None:
        """Set the processes that split the rows' tokens."""
        self._tokens = exchange

    def labels(
        self, targets: torch.Tensor, device: torch.device, context: MicrobatchContext
    ) -> Labelled | None:
        """Return the positions of targets (B, T), on the host, whose logits are needed."""
        if self._hook is None:
            return None
        return Labelled(targets, device, context.decode is not None)

    @contextmanager
    def only(self, labelled: Labelled | None) -> Iterator[None]:
        """Context manager in which the head runs on these positions only."""
        self._labelled = labelled
        try:
            yield
        finally:
            self._labelled = None

    def _keep_labelled_rows(self, head: nn.Module, args: tuple[torch.Tensor]) -> Any:
        if self._labelled is None or args[0].shape[:2] != self._labelled.shape:
            return None  # ProphetNet's head makes several predictions per row
        return (self._labelled.of(args[0])[None],)

    def outcome(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Message:
        """Return a message with the loss, the next tokens, or the rows' log-probabilities.

        Args:
            reference: (B,) reference log-probabilities of all rows of the microbatch.
        """
        rows = labelled.of(logits) if logits.shape[:2] == labelled.shape else logits[0]
        if context.decode is not None:
            return Message((), {}, scores=likeliest(rows, *self._vocabulary))
        total, sums, scores = self._totals(labelled, rows, context, reference)
        # None for references
        loss = None if total is None else total / max(context.label_tokens, 1)
        return Message((), {}, (), loss, None, sums, scores)

    def _totals(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Totals:
        total = self._loss_sum(logits, labelled.targets)
        return total, labelled.by_source(self._loss_sum, logits, total), None

    def _loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of logits (N, V) and targets (N,)."""
        if self._token_loss is not None:
            return token_loss_sum(self._token_loss, logits, targets)
        start, group = self._vocabulary
        if group is None:
            return token_cross_entropy_sum(logits, targets)
        return vocabulary_parallel_cross_entropy_sum(logits, targets, start, group)


class PreferenceObjective(Objective):
    """Loss of answer pairs, whose labels encode their row.

    A process without rows computes another process's row, with no effect. Of the processes that
    split the rows' tokens, each has the gradient for its own tokens, and only the first one returns
    a non-zero loss.

    Args:
        rows: the processes that split the rows.
    """

    def __init__(self, module: Any, loss: PreferenceLoss, rows: RowShares) -> None:
        super().__init__(module)
        self._loss, self._rows = loss, rows

    def _totals(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Totals:
        rows = self._rows.own(len(context.sample_ids))
        if not rows:
            nothing = self._loss_sum(logits, labelled.targets)
            return (
                None if reference is None else nothing, {}, nothing.detach().new_zeros(0)
            )
        scores = -labelled.row_sums(self._loss_sum, logits, rows)
        if self._tokens is not None:
            scores = _summed(scores, self._tokens)
        if reference is None:
            return None, {}, scores
        total = self._loss(scores, reference[rows.start : rows.stop])
        if self._tokens is not None and self._tokens.rank != CONTRIBUTOR:
            total = total - total.detach()
        return total, {}, scores


def _summed(scores: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sum over processes in rank order, for identical bits; only the local part has a gradient."""
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    local = scores.detach()
    received = exchange.start(
        [(rank, local) for rank in peers],
        [(rank, (tuple(local.shape), local.dtype)) for rank in peers], local.device,
    ).wait()
    scores_of = dict(zip(peers, received, strict=True)) | {exchange.rank: scores}
    return torch.stack([scores_of[rank] for rank in range(exchange.size)]).sum(0)
