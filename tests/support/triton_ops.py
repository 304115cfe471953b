"""Small kernels around the helpers of ``raymm/kernels/flash/gpu/ops.py``.

Imported only in the process in which Triton's interpreter is selected.
"""

import triton
import triton.language as tl

from raymm.kernels.flash.gpu.ops import load_rows, next_block, store_rows, visible


@triton.jit
def seen_keys(out, lo1, length1, lo2, length2, N: tl.constexpr):
    keys = tl.arange(0, N)
    none = keys * 0
    seen = visible(
        keys, none + lo1, none + length1, none + lo2, none + length2, keys, keys, False
    )
    tl.store(out + keys, seen.to(tl.int32))


@triton.jit
def double_rows(source, target, n_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    tile = load_rows(source, stride, n_rows, 8, D, BLOCK_D, True)
    store_rows(target, tile * 2, stride, n_rows, 8, D, BLOCK_D)


@triton.jit
def visited_blocks(out, runs, n_tiles):
    run = 0
    block, stop = tl.load(runs), tl.load(runs + 1)
    for tile in range(n_tiles):
        tl.store(out + tile, block)
        run, block, stop = next_block(runs, run, block, stop)
