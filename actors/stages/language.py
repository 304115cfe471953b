"""Language model stages: embedding and merge, blocks, head and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raymm.actors.adapters.lora import disable_dropout
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.experts.routing import Routing
from raymm.actors.modules.cut import CutInfo
from raymm.actors.modules.merge import (
    IGNORE_INDEX,
    CrossAttend,
    MergePolicy,
    merge_rows,
    merged_layout,
)
from raymm.actors.modules.message import ROUTED_TOKENS, Message, MicrobatchContext, StageModule
from raymm.actors.modules.message_samples import SHAPE
from raymm.actors.modules.packed_rows import pack_rows
from raymm.actors.modules.token_layout import MASKS, MaskPolicy
from raymm.actors.sharding.context_rows import message_tokens, resize_tokens, token_pairs
from raymm.actors.sharding.fully_sharded import FullyShardedPlan, shard_parameters
from raymm.actors.sharding.sample_rows import row_shares, take_rows, text_of_samples
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.sharding.tensor_shard import shard_module
from raymm.actors.sharding.visual_tokens import LENGTH, SHOWN, own_visual_tokens
from raymm.actors.stages.attention_arguments import (
    Attended,
    MaskedAttention,
    attention_arguments,
)
from raymm.actors.stages.draw_grids import DRAWN_ROWS, rows_of_share, sample_rows, text_grid
from raymm.actors.stages.labels import PAIR, Labelled, compared, pair_shares, with_sources
from raymm.actors.stages.part_forward import PartForward
from raymm.actors.stages.stage_inputs import for_model, from_side, from_stages, message_of
from raymm.actors.stages.texts.decoding import KeyValueCaches, likeliest
from raymm.actors.stages.texts.joined_texts import apart_if_need_be
from raymm.actors.stages.token_loss import TokenLoss, token_loss_sum
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ForwardLeft, ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.cross_entropy import (
    token_cross_entropy_sum,
    vocabulary_parallel_cross_entropy_sum,
)
from raymm.kernels.hf.known_masks import no_packed_rows
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.preference import PreferenceLoss
from raymm.kernels.shared_draws import Grid, set_grid
from raymm.scheduler.graph.module_graph import Port

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = "reference"
_LONGEST = "longest"  # side tensor: one more than the largest position of a microbatch
_READ_BY_MERGE = frozenset({"input_ids", "labels", "sample_index", "encoder_kinds"})
_NOT_FOR_MODEL = frozenset({
    "targets", "token_layout", "length", LENGTH, ROUTED_TOKENS, _LONGEST, DRAWN_ROWS,
})


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


class LanguageStage(StageModule):
    """Blocks [lo, hi) of a language model, with embeddings (first stage) or head and loss (last).

    The loss is the sum of cross entropies over label tokens divided by the number of label tokens
    of the entire step (``context.label_tokens``). The head runs only on labelled positions.
    """

    module: PreTrainedModel

    def __init__(self, spec: LanguageSpec, lo: int, hi: int, module: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.module = cast("PreTrainedModel", module)
        if spec.preference is not None and spec.preference.disable_dropout:
            disable_dropout(self.module)
        self.first = lo == 0
        self._has_cross_layers = isinstance(spec.merge, CrossAttend) and any(
            lo <= layer < hi for port in spec.ports for layer in port.layers
        )
        self.last = hi == spec.num_blocks
        uncut = self.first and self.last
        self._routing = Routing(module, spec.mixture)
        self._forward = PartForward(spec.name, module, None if uncut else spec.cut, lo, hi)
        self._labelled: Labelled | None = None
        self._caches = KeyValueCaches(module, lo, hi)
        if self.last:
            head = self.module.get_output_embeddings()
            if head is None:
                raise TypeError(f"{type(module).__name__} has no output embeddings (no lm_head)")
            self._hook = head.register_forward_pre_hook(self._keep_labelled_rows)
        self._masked: MaskedAttention | None = None
        self._exchange: Exchange | None = None
        self._samples: Exchange | None = None
        self._vocabulary: tuple[int, TensorGroup] | None = None
        self._mask = spec.mask
        # Cost of a token outside attention; needed where processes may get unequal token counts.
        named = spec.mask is None or spec.mask in MASKS.values()
        self._pairs = 0 if named else token_pairs(self.module.config)
        if spec.packing and self._mask is None:
            self._mask = MASKS["causal"]
        if self._mask is not None:
            self._use_masks()

    def _use_masks(self) -> None:
        blocks, mixers = self._forward.blocks, self.spec.mixers
        self._masked = MaskedAttention(self.module, blocks, mixers, self._has_cross_layers)

    def share_tokens(self, exchange: Exchange) -> None:
        """Split every sample's tokens over a group of processes (context parallelism)."""
        self._exchange, self.is_shared = exchange, True
        if self._mask is None:
            self._mask = MASKS["causal"]
            self._use_masks()

    def share_samples(self, exchange: Exchange) -> None:
        """Split every microbatch's samples over a group of processes, which get the same inputs.
        Losses and parameter gradients are partial sums."""
        self._samples, self.is_shared = exchange, True

    def shard_parameters(
        self, plans: Mapping[str, FullyShardedPlan], group: dist.ProcessGroup,
        device: torch.device, compute_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Shard the parameters over a group of processes with FSDP.

        Args:
            plans: plan of ``spec.source``, the entire module, under ``"module"``.
            compute_dtype: dtype in which matrices are gathered; None keeps their dtype.
        """
        shard_parameters(self, self.module, plans["module"], group, device, compute_dtype)

    def shard_tensors(self, plans: Mapping[str, TensorPlan], group: TensorGroup) -> None:
        """Shard the parameters over a tensor-parallel group, by the plan under ``"module"``."""
        plan, self.is_shared = plans["module"], True
        shard_module(self.module, plan, group)
        vocabulary = plan.vocabulary(group.rank)
        if self.last and vocabulary is not None:
            self._vocabulary = (vocabulary[0], group)

    def detach(self) -> None:
        """Restore the module: the single-process reference builds a stage per forward."""
        self._forward.detach()
        self._routing.detach()
        if self.last:
            self._hook.remove()
        if self._masked is not None:
            self._masked.detach()

    @classmethod
    def build(cls, spec: LanguageSpec, lo: int, hi: int) -> LanguageStage:
        """Build only the parts that blocks [lo, hi) need."""
        stage_part = None
        if lo > 0 or hi != spec.num_blocks:
            assert spec.cut is not None  # a module without cut is one stage
            stage_part = Part(spec.cut, lo, hi)
        return cls(spec, lo, hi, spec.source.build(stage_part))

    def _keep_labelled_rows(self, head: nn.Module, args: tuple[torch.Tensor]) -> Any:
        if self._labelled is None or args[0].shape[:2] != self._labelled.shape:
            return None  # ProphetNet's head makes several predictions per row
        return (self._labelled.of(args[0])[None],)

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
        hidden: torch.Tensor | None = None
        inputs = with_sources(inputs or {}, rows=self.spec.preference is not None)
        reference = inputs.pop(REFERENCE, None)
        if self.first:
            if context.samples:
                inputs = text_of_samples(inputs, context)
                set_grid(Grid(sample_rows(context, "", len(inputs["input_ids"]))))
            context.enter("merge")
            side = self._merge(inputs, received, context)
            longest = self._longest(side, context)
            drawn = None
            if (row_exchange := self._samples) is not None:
                together = PAIR if self.spec.preference else 1
                rows = row_shares(
                    len(side["targets"]), row_exchange.size, together
                )[row_exchange.rank] or range(1)
                drawn = rows_of_share(rows, side, self.spec.packing)
                side = take_rows(side, row_exchange.rank, row_exchange.size, together)
            ports = self._ports(side)
            if self._mask is not None and ports:
                ports = self._own_ports(ports, side)
            if self.spec.packing:
                side = pack_rows(side, side.pop("token_layout"))
            embeds = side.pop("inputs_embeds")
        else:
            hidden, side, ports = from_stages(received, self.spec.name)
            drawn = side.pop(DRAWN_ROWS, None)
            embeds, longest = None, side.get(_LONGEST)
        attended = Attended({}, side, embeds, hidden)
        if self._mask is not None and "token_layout" in side:
            attended = attention_arguments(
                attended, self._mask, self._exchange, self._pairs, self.module.config,
                bool(self.spec.mixers),
            )
        attention, side, embeds, hidden, tokens = attended
        if drawn is not None:
            side[DRAWN_ROWS] = drawn
        if longest is not None:
            self._forward.rotary.set_longest(int(on_host(longest)))
            side[_LONGEST] = longest
        start = embeds if hidden is None else hidden
        assert start is not None  # received, or the first stage's embeddings
        targets, device = on_host(side["targets"]), start.device
        set_grid(text_grid(context, targets.shape, drawn, tokens, self.spec.packing))
        if hidden is not None:
            # As wide as the embeddings, which may be narrower than the hidden state (OPT-350m).
            width = cast(nn.Embedding, self.module.get_input_embeddings()).weight.shape[1]
            # Real zeros, not zero-stride ones: some models scale them in place (CTRL, GIT).
            embeds = torch.zeros(*targets.shape, width, device=device)
        hidden_from_model = _NOT_FOR_MODEL | ({SHOWN} if self._mask is not None else set())
        kwargs = {
            name: for_model(name, value, device)
            for name, value in side.items()
            if name not in hidden_from_model and not name.startswith(SHAPE)
        } | from_side({n: v for n, v in side.items() if n.startswith(SHAPE)}, device) | ports
        adapt_arguments = getattr(self.spec.merge, "model_arguments", None)
        if adapt_arguments is not None and self._mask is None:
            kwargs = adapt_arguments(kwargs)
        labelled = Labelled(targets, device, context.decode is not None) if self.last else None
        try:
            self._labelled = labelled
            with (
                no_packed_rows(self._mask is not None or "position_ids" not in kwargs),
                self._routing.noted(side.get(ROUTED_TOKENS)),
                self._caches.arguments(context.decode, targets.shape[1]) as caching,
            ):
                logits = self._forward(
                    hidden, context, inputs_embeds=embeds, **kwargs, **attention, **caching
                ).logits
        except ForwardLeft as cut:
            hidden, side = self._with_room(cut.value, side)
            return self._routing.into(message_of(hidden, ports, side), context)
        finally:
            self._labelled = None
            self._forward.rotary.set_longest(None)
        assert labelled is not None  # earlier stages raise ForwardLeft
        return self._routing.into(self._outcome(labelled, logits, context, reference), context)

    def _longest(
        self, merged: dict[str, Any], context: MicrobatchContext
    ) -> torch.Tensor | None:
        """Return one more than the largest position, on the host, if rotary embeddings need it."""
        if not self._forward.rotary or context.decode is not None:
            return None
        positions = merged.get("position_ids")
        length = merged["targets"].shape[1] if positions is None else int(positions.max()) + 1
        return torch.tensor(length, device="cpu")

    def _outcome(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Message:
        """Return a message with the loss, the next tokens, or the rows' log-probabilities."""
        rows = labelled.of(logits) if logits.shape[:2] == labelled.shape else logits[0]
        if context.decode is not None:
            return Message((), {}, scores=likeliest(rows, *(self._vocabulary or (0, None))))
        entropy, sums, scores = self._loss_sum, {}, None
        if (loss := self.spec.preference) is None:
            total = entropy(rows, labelled.targets)
            sums = labelled.by_source(entropy, rows, total)
        else:
            pairs = pair_shares(len(context.sample_ids), self._samples)
            scores, total = compared(
                loss, labelled, entropy, rows, pairs, reference, self._exchange
            )
        # None for references
        loss = None if total is None else total / max(context.label_tokens, 1)
        return Message((), {}, (), loss, None, sums, scores)

    def _with_room(
        self, hidden: torch.Tensor, side: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Resize a message to a token count that depends on shapes only."""
        if self._exchange is not None:
            length = int(on_host(side["length"]))
            tokens = message_tokens(length, self._exchange.size, self._pairs)
            hidden, side = resize_tokens(hidden, side, tokens)
        return hidden, side

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

    def _own_ports(
        self, ports: dict[str, torch.Tensor], side: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return this process's part of cross-attention ports; ``side`` gets their full length.

        Raises:
            ModelError: the ports are not for cross attention.
        """
        if SHOWN not in side:
            raise ModelError(
                f"the merge policy returned {', '.join(ports)} as ports; with a mask, or cp above "
                "1, ports are accepted for cross attention (CrossAttend) only"
            )
        ports, side[LENGTH] = own_visual_tokens(ports, self._exchange)
        return ports

    def _loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.spec.token_loss is not None:
            return token_loss_sum(self.spec.token_loss, logits, targets)
        if self._vocabulary is None:
            return token_cross_entropy_sum(logits, targets)
        start, group = self._vocabulary
        return vocabulary_parallel_cross_entropy_sum(logits, targets, start, group)

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
        to_merge = {**inputs, "inputs_embeds": embeds, "labels": labels}
        if self._mask is not None:
            to_merge["encoder_kinds"] = {name: n for n, name in enumerate(self.spec.encoders, 1)}
        try:
            merged = merge_rows(self.spec.merge, features, to_merge)
        except ModelError as error:
            ids = context.own_ids
            if error.row is not None:
                ids = ids[error.row : error.row + 1]
            raise ModelError(f"{error} (sample id: {', '.join(ids) or 'unknown'})") from None
        mask = merged.get("attention_mask")
        if self._mask is not None:
            merged["token_layout"], mask = merged_layout(merged, self.spec.mask), None
        elif mask is not None and mask.dim() == 2:
            # Attention without padding mask is faster.
            mask = None if bool(on_host(mask).all()) else on_host(mask)
        merged["attention_mask"] = mask
        if self.spec.mixture is not None:
            layout = merged.get("token_layout")
            merged[ROUTED_TOKENS] = self._routing.real(mask, merged["labels"].shape, layout)
        labels = on_host(merged["labels"])
        merged["targets"] = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return {k: v for k, v in merged.items() if k not in _READ_BY_MERGE and v is not None}
