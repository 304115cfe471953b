"""Claim: with full blocks, the slowest context-parallel process is near its even share.

Run with `python -m benchmarks.token_time --json`.

Masks are drawn (`benchmarks.shared.drawn_masks`): packed documents of lognormal lengths, a long one
among short ones, documents with images, causal blockwise; 4k to 128k tokens over 2 to 32 processes,
distributed as in training. A process's time is the attention of its rows, in tiles of the kernels
(a tile is computed entirely if one of its rows sees one of its keys), plus the other work of a
layer for its tokens, in the proportions of three models. Figures: the slowest process's time over
its even share of the time of the undivided sequence without padding, with

- `odd blocks`: equal counts of blocks, eight per process, of any size;
- `equal`: equal counts of blocks of a power of two, 128 at most;
- `by cost`: counts that may differ, of blocks of 128;

Processes with fewer than 1,024 tokens have smaller blocks and separate figures (`small`), as they
have fewer than eight blocks of 128. `tokens` is the largest number of tokens of a process over the
mean if counts may differ; `attention` the largest attention of a process over the mean at equal
counts, in the distributed blocks; `bound` a lower bound for all equal counts; and `proven` 1 if
`attention` equals the bound, else 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.drawn_masks import DRAWS, Draw
from raymm.actors.sharding.context_rows import (
    BLOCKS_PER_PROCESS,
    MOST_BLOCK,
    block_size,
    block_token_work,
    token_pairs,
)
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.distribution import TokenDistribution, distribute
from raymm.scheduler.context_parallel.workload import active_key_blocks

TILE = (128, 64)  # rows and keys of a forward's tile at head dim 128
LOG_TOKENS, LOG_PROCESSES = (12, 17), (1, 5)
QUANTILES = (0.5, 0.95, 1.0)
MODELS = {  # hidden size, MLP's, query heads, key heads, head dim
    "0.5B": (896, 4864, 14, 2, 64),
    "8B": (4096, 14336, 32, 8, 128),
    "70B": (8192, 28672, 64, 8, 128),
}


def pairs_of(model: str) -> int:
    """Return a token's work other than attention, in pairs of a query and a key."""
    from transformers import LlamaConfig

    hidden, inner, heads, key_heads, head_dim = MODELS[model]
    return token_pairs(LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head_dim,
    ))  # fmt: skip


def tile_pairs(mask: AttentionMask) -> int:
    """Return the number of pairs that kernels compute."""
    tiles = active_key_blocks(
        mask.query_table, mask.key_table, *mask.shape, query_block=TILE[0], key_block=TILE[1]
    )
    return int(tiles.sum()) * TILE[0] * TILE[1]


def slowest(mask: AttentionMask, found: TokenDistribution, pairs: int) -> int:
    """Return the largest time of a process, in pairs."""
    layout = ContextLayout.of_blocks(found.blocks, found.block, found.n_tokens)
    return max(
        tile_pairs(mask.select_queries(ranges)) + pairs * tokens
        for ranges, tokens in zip(layout.ranges, layout.sizes, strict=True)
    )


def case(
    draw: Draw, generator: np.random.Generator, models: dict[str, int]
) -> tuple[str, dict[str, float]]:
    """Return the block kind (full or small) and the figures of one random mask."""
    tokens = int(2 ** generator.uniform(*LOG_TOKENS))
    processes = 2 ** int(generator.integers(LOG_PROCESSES[0], LOG_PROCESSES[1] + 1))
    seed = int(generator.integers(1 << 31))

    def dealt(block: int) -> tuple[AttentionMask, np.ndarray]:
        """Return the mask of the padded sequence, and the work of its blocks."""
        length = -(-tokens // (block * processes)) * block * processes
        mask = draw(tokens, length - tokens, np.random.default_rng(seed))
        return mask, active_key_blocks(
            mask.query_table, mask.key_table, *mask.shape, query_block=block, key_block=block
        )

    whole = tile_pairs(draw(tokens, 0, np.random.default_rng(seed)))
    odd = max(1, min(MOST_BLOCK, tokens // (BLOCKS_PER_PROCESS * processes)))
    odd_mask, odd_work = dealt(odd)
    block = block_size(tokens, processes)
    mask, work = dealt(block)
    before = distribute(odd_work, processes, block=odd)
    equal = distribute(work, processes, block=block)
    result = {
        "attention": equal.imbalance,
        "bound": equal.bound * processes / max(1, int(work.sum())),
        "proven": float(equal.status == "optimal"),
    }
    for model, pairs in models.items():
        share = (whole + pairs * tokens) / processes
        token_work = block_token_work(block, pairs)
        by_cost = distribute(work, processes, block=block, token_work=token_work)
        result |= {
            f"odd blocks {model}": slowest(odd_mask, before, pairs) / share,
            f"equal {model}": slowest(mask, equal, pairs) / share,
            f"by cost {model}": slowest(mask, by_cost, pairs) / share,
            f"tokens {model}": by_cost.token_imbalance,
        }
    return "full" if block == MOST_BLOCK else "small", result


def main() -> None:
    options = common.parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--masks", type=int, default=300, help="masks per kind")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    console = common.console()
    models = {model: pairs_of(model) for model in MODELS}
    result: dict[str, Any] = {"machine": common.machine(), "token_pairs": models}
    table = Table("mask", "blocks", "of", *(f"{q:.0%}" for q in QUANTILES))
    for kind, draw in DRAWS.items():
        generator = np.random.default_rng(args.seed)
        cases = [case(draw, generator, models) for _ in range(args.masks)]
        for size in ("full", "small"):
            alike = [figures for of, figures in cases if of == size]
            result[f"{kind}, {size}: masks"] = len(alike)
            result[f"{kind}, {size}: proven"] = sum(one.pop("proven") for one in alike)
            for name in alike[0] if alike else ():
                values = [one[name] for one in alike]
                quantiles = [round(float(np.quantile(values, q)), 4) for q in QUANTILES]
                result[f"{kind}, {size}: {name}"] = quantiles
                table.add_row(kind, size, name, *map(str, quantiles))
            console.print(f"{kind}, {size}: {len(alike)} masks", result[f"{kind}, {size}: proven"])
    console.print(table)
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
