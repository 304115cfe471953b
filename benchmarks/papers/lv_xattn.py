"""LV-XAttn: seconds of cross attention with Ring Attention and with moving queries.

Work is that of the paper's Table 1: 4 FLOPs per query, key and element of all heads forward, 10
backward, at the device's rate of matrix products. Bytes are those of
:mod:`raymm.scheduler.context_parallel.traffic`; every round takes the longer of compute and
messages.

Two quantities are not printed, and both values of each are computed. Elements have four bytes if
the 79.73 GB of keys and values per layer of mPLUG-Owl3-7b with 4,096 frames (§3.2; 2 x 2,985,984
tokens x 28 heads x 128) are GiB, and two bytes with the released models' dtype. A node of four
A100s has 25 GB/s across nodes: a message has all of it if the ring follows nodes, and a quarter if
every message leaves its node.

The text's Table 3 has no Llama 3-V, which later versions of the paper add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.papers.tables import Row, Table
from raymm.scheduler.context_parallel.traffic import AttentionShape, method_bytes
from raymm.scheduler.costs.devices import DEVICES, DeviceSpec, Link

KIBI = 1024
DTYPE = "fp32"
FORWARD, BACKWARD = 4, 10  # FLOPs per query, key and element, Table 1
FRAME_TOKENS = {"mPLUG-Owl3": 729, "OpenFlamingo": 64}  # §4.1


class Attention(NamedTuple):
    """Cross attention layers of a model (Table 2); heads and their width are the released models'
    (12 and 8 heads in Tables 5 and 6)."""

    layers: int
    heads: int
    width: int


MODELS = {
    "mPLUG-Owl3-7b": Attention(4, 28, 128), "mPLUG-Owl3-2b": Attention(4, 12, 128),
    "mPLUG-Owl3-1b": Attention(4, 14, 64), "OpenFlamingo-9b": Attention(8, 8, 64),
    "OpenFlamingo-3b": Attention(24, 8, 64),
}
# Tables 3 and 4: text tokens and frames, in units of 1024; seconds of cross attention with Ring
# Attention and with LV-XAttn.
TABLE_3 = {
    "mPLUG-Owl3-7b": ((8, 4, 174.73, 24.08), (8, 2, 89.88, 12.14), (4, 2, 92.48, 6.45)),
    "mPLUG-Owl3-2b": ((8, 4, 83.41, 10.33), (8, 2, 36.66, 5.21), (4, 2, 37.78, 2.79)),
    "mPLUG-Owl3-1b": ((8, 4, 47.12, 5.17), (8, 2, 22.63, 2.62), (4, 2, 23.26, 1.52)),
    "OpenFlamingo-9b": ((64, 64, 95.13, 62.4), (64, 32, 47.86, 31.44), (32, 32, 33.58, 16.0)),
    "OpenFlamingo-3b": ((64, 64, 276.69, 187.45), (64, 32, 138.05, 94.1), (32, 32, 102.82, 47.98)),
}
TABLE_4 = {
    "mPLUG-Owl3-7b": ((1, 0.5, 42.41, 1.42), (1, 0.25, 20.81, 0.66), (0.5, 0.25, 20.84, 0.45)),
    "mPLUG-Owl3-2b": ((1, 0.5, 17.85, 0.78), (1, 0.25, 9.06, 0.44), (0.5, 0.25, 9.15, 0.3)),
    "mPLUG-Owl3-1b": ((1, 0.5, 10.6, 0.44), (1, 0.25, 5.38, 0.25), (0.5, 0.25, 5.31, 0.18)),
    "OpenFlamingo-9b": ((8, 8, 17.28, 3.99), (8, 4, 8.74, 2.2), (4, 4, 8.87, 1.23)),
    "OpenFlamingo-3b": ((8, 8, 52.26, 12.25), (8, 4, 26.09, 6.43), (4, 4, 25.84, 3.62)),
}
A100 = replace(DEVICES["A100-80GB"], across_nodes=Link(10e-6, 25e9))
# Data sheet of A30: 10.3 TFLOP/s in fp32, 165 in bf16; one per node (§4.1).
A30 = DeviceSpec(
    "A30", {"bf16": 165e12, "fp32": 10.3e12}, 933e9, 24 * 10**9,
    Link(10e-6, 1.25e9), Link(10e-6, 1.25e9),
)


def attention_seconds(
    model: str, text: float, frames: float, device: DeviceSpec, gpus: int, method: str,
    share: int = 1, element_bytes: int = 4,
) -> float:
    """Return seconds of a step's cross attention.

    Args:
        text, frames: text tokens and frames, in units of 1024.
        method: ``"ring"`` or ``"rotate"`` (LV-XAttn).
        share: GPUs that share the link across nodes.
        element_bytes: bytes per element of queries, keys, values and their gradients.
    """
    layers, heads, width = MODELS[model]
    queries = round(text * KIBI)
    keys = round(frames * KIBI) * FRAME_TOKENS[model.rpartition("-")[0]]
    shape = AttentionShape.even(
        gpus, queries, keys, query_heads=heads, key_heads=heads, head_dim=width,
        activation_bytes=element_bytes, accumulator_bytes=element_bytes,
    )
    sent = method_bytes(shape, method)
    rate = device.peak(DTYPE) * device.efficiency
    bandwidth = device.across_nodes.bandwidth / share
    per_flop = queries / gpus * keys * heads * width / rate
    return layers * sum(
        max(flops * per_flop, max(nbytes) / bandwidth)
        for flops, nbytes in ((FORWARD, sent.forward), (BACKWARD, sent.backward))
    )


def _tables(
    number: int, printed, device: DeviceSpec, gpus: int, variants: dict[tuple[int, int], str],
    missing: str,
) -> list[Table]:
    """Return tables of both methods and of their ratio for variants, which name the GPUs that share
    a link and the bytes per element."""
    found = []
    for variant, label in variants.items():
        columns: dict[str, list[tuple[str, float, float]]] = {"ring": [], "rotate": []}
        for model, cases in printed.items():
            for text, frames, *seconds in cases:
                for (method, rows), paper in zip(columns.items(), seconds, strict=True):
                    raymm = attention_seconds(model, text, frames, device, gpus, method, *variant)
                    rows.append((f"{model}, {text:g}K text, {frames:g}K frames", paper, raymm))
        name, place = f"LV-XAttn, Table {number}", "§4.2"
        if not found:
            found.append(Table(
                f"{name}: LV-XAttn", place, "s of cross attention",
                tuple(Row(*row) for row in columns["rotate"]),
                "rate of fp32 products that the kernels reach",
            ))
        found += [
            Table(
                f"{name}: Ring Attention, {label}", place, "s of cross attention",
                tuple(Row(*row) for row in columns["ring"]), missing,
            ),
            Table(
                f"{name}: speedup, {label}", place, "cross attention, Ring Attention over LV-XAttn",
                tuple(
                    Row(ring[0], round(ring[1] / lv[1], 3), ring[2] / lv[2])
                    for ring, lv in zip(columns["ring"], columns["rotate"], strict=True)
                ),
                missing,
            ),
        ]
    return found


def tables() -> list[Table]:
    """Return Tables 3 and 4."""
    return [
        *_tables(
            3, TABLE_3, A100, 16,
            {(1, 4): "ring along nodes", (4, 4): "four GPUs share a node's link"},
            "order of the ring, bytes per element; total times also need the language models",
        ),
        *_tables(
            4, TABLE_4, A30, 8, {(1, 4): "4 bytes per element", (1, 2): "2 bytes per element"},
            "bytes per element",
        ),
    ]
