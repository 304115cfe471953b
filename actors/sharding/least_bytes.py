"""Attention method for ``kernels.hf.shared_batch.CrossAttention`` that sends the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raymm.actors.sharding.context_method import choose, computed_in
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import METHODS


@dataclass(frozen=True)
class LeastBytes:
    """Method choice, equal on all processes: send queries, or keys and values, whichever is fewer
    bytes.

    ``backward`` counts the bytes of a backward pass; ``methods`` are the candidates.
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
        """Return the method for query (B, Hq, Tq, D) and key (B, Hk, Tk, D), given their shape and
        dtype.

        ``recompute``, for queries, keys and values in the backward pass, excludes ulysses.

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
