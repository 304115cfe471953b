"""The attention method that sends the fewest bytes, chosen when a layer attends: what
``kernels.hf.shared_batch.CrossAttention`` takes for a method, as the choice is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymm.actors.sharding.context_method import choose, computed_in
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import METHODS


@dataclass(frozen=True)
class LeastBytes:
    """``method=LeastBytes()``: keys and values or queries move, whichever is less.

    Layouts and masks are the same on every process, so all choose alike.

    Attributes:
        backward: whether the bytes of a backward pass count.
        methods: which may be chosen.
    """

    backward: bool = True
    methods: tuple[str, ...] = METHODS

    def __call__(
        self,
        group: ContextGroup,
        masks: tuple[AttentionMask, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        recompute: bool = False,
    ) -> str:
        """The method for one call.

        Args:
            query: (B, Hq, Tq, D), of which only shape and dtype are read.
            key: (B, Hk, Tk, D).
            recompute: whether queries, keys and values are made again in the backward pass,
                which rules ulysses out.

        Raises:
            PlanError: none of the methods can be used.
        """
        methods = tuple(m for m in self.methods if not (recompute and m == "ulysses"))
        return choose(
            tuple(masks), group.queries, group.keys,
            heads=(query.shape[1], key.shape[1]), head_dim=query.shape[3],
            element_bytes=computed_in(query).itemsize, sequences=query.shape[0],
            backward=self.backward, methods=methods,
        )  # fmt: skip
