"""OmniBal: its ablation of data, model and memory balance, InternVL-Chat-1.5 (6+20B) on A100s.

The sizes of samples are not printed, but the paper's statistics of mini-batches are: they give the
tiles and tokens that the slowest device of a step has, with random mini-batches and with balanced
ones. A pipeline has the four stages of the paper's Table 7, over all layers of both models, all
trained:

- *baseline*: random mini-batches of 4, stages with equal parameters, everything is recomputed;
- *data*: balanced mini-batches; *model*: stages balanced by forward and backward;
- *memory*: nothing is recomputed, a bound, as the printed free memory needs the tensor-parallel
  degree.

Seconds per mini-batch are those of another microbatch in the simulated pipeline, without warm-up
and drain, because microbatches per step are not printed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from benchmarks.baselines.parametric_partition import partition_layers
from benchmarks.papers.tables import Row, Table
from raymm.costs.analytic import analytic_layers
from raymm.costs.load import Load
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.schedule.lower import iteration_time
from raymm.scheduler.search.module_degrees import make_plan
from raymm.scheduler.search.partition import Ranges, even_layers

DEVICE, DTYPE = "A100-80GB", "bf16"
STAGES = 4  # Table 7
MICROBATCHES = 8  # of the shorter of two steps whose difference is the time of a microbatch
SAMPLES = 1_200_000  # InternVL-Chat-1.2 (§5.1)
TILE_TOKENS = 1025
DAY = 86_400.0
MISSING = (
    "sizes of samples (their printed statistics are used), microbatches per step, tensor-parallel "
    "degree, efficiency"
)
# Table 3, page 8: GPU days.
TABLE_3 = {
    "baseline": 61.8, "data": 51.9, "data, model": 29.0, "data, model, memory": 21.3,
}
# Table 6, page 9: GPU days with balanced data, everything recomputed.
TABLE_6 = {"parameter-based": 42.2, "layer-based": 30.6, "profile-based": 30.9, "balanced": 29.0}


class Groups(NamedTuple):
    """Mini-batches of Table 5 (page 9): samples, tiles and text tokens of the largest (0 if not
    limited), padding, and distance of the mean device from the slowest, of vision and text."""

    samples: float
    tiles: int
    tokens: int
    pad: float
    vision: float
    text: float


RANDOM = Groups(4, 0, 0, 0.31, 0.34, 0.30)
BALANCED = Groups(4.6, 9, 4096, 0.0, 0.02, 0.14)


class SlowestLoad(NamedTuple):
    """Tiles and padded tokens of the slowest device, and samples of a mini-batch."""

    tiles: int
    tokens: int
    samples: float


def slowest(groups: Groups) -> SlowestLoad:
    """Return the load of the slowest device. Means per sample follow from the balanced groups,
    whose largest sizes are printed."""
    tiles = BALANCED.tiles * (1 - BALANCED.vision) / BALANCED.samples
    tokens = BALANCED.tokens * (1 - BALANCED.text) / BALANCED.samples
    return SlowestLoad(
        round(tiles * groups.samples / (1 - groups.vision)),
        round(tokens * groups.samples / (1 - groups.pad) / (1 - groups.text)),
        groups.samples,
    )


@cache
def layers(load: SlowestLoad) -> tuple[LayerCost, ...]:
    """Return the costs of all layers of InternViT-6B and InternLM2-20B, the latter with the
    sequences of a mini-batch one after another."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

    from raymm.actors.weights.source import ConfigSource

    vision = CLIPVisionConfig(
        num_hidden_layers=45, hidden_size=3200, intermediate_size=12800, num_attention_heads=25,
        image_size=448, patch_size=14,
    )
    text = LlamaConfig(
        num_hidden_layers=48, hidden_size=6144, intermediate_size=16384, num_attention_heads=48,
        num_key_value_heads=8, vocab_size=92553, tie_word_embeddings=False,
    )
    return (
        *analytic_layers(
            ConfigSource(CLIPVisionModel, vision).skeleton(), Load(load.tiles, TILE_TOKENS),
            DEVICE, DTYPE,
        ),
        *analytic_layers(
            ConfigSource(LlamaForCausalLM, text).skeleton(), Load(1, load.tokens), DEVICE, DTYPE,
            causal=True,
        ),
    )


def partitions(load: SlowestLoad) -> dict[str, Ranges]:
    """Return the stages of the methods of Table 6."""
    costs = layers(load)
    return {
        "parameter-based": partition_layers([c.parameter_bytes for c in costs], STAGES),
        "layer-based": even_layers(len(costs), STAGES),
        "profile-based": partition_layers([c.forward for c in costs], STAGES),
        "balanced": partition_layers(
            [2 * c.forward + c.backward_input + c.backward_weight for c in costs], STAGES
        ),
    }


def gpu_days(load: SlowestLoad, ranges: Ranges, recompute: bool) -> float:
    """Return the GPU days of an epoch."""
    costs = layers(load)
    graph = ModuleGraph((ModuleNode("vlm", (True,) * len(costs)),), ())
    profile = CostProfile({"vlm": costs}, DEVICE, DTYPE)
    short, long = (
        iteration_time(make_plan(
            graph, {"vlm": ranges}, microbatches, "1f1b", profile, recompute,
            recompute_loss=recompute,
        ))
        for microbatches in (MICROBATCHES, 2 * MICROBATCHES)
    )
    seconds = (long - short) / MICROBATCHES
    return seconds * STAGES * SAMPLES / load.samples / DAY


def tables() -> list[Table]:
    """Return Tables 3 and 6."""
    random, even = slowest(RANDOM), slowest(BALANCED)
    cuts = partitions(even)
    ablation = {
        "baseline": gpu_days(random, partitions(random)["parameter-based"], True),
        "data": gpu_days(even, cuts["parameter-based"], True),
        "data, model": gpu_days(even, cuts["balanced"], True),
        "data, model, memory": gpu_days(even, cuts["balanced"], False),
    }
    model = {name: gpu_days(even, ranges, True) for name, ranges in cuts.items()}
    found = []
    for number, page, printed, raymm, unit in (
        (3, 8, TABLE_3, ablation, "data, model, memory"), (6, 9, TABLE_6, model, "balanced"),
    ):
        found += [
            Table(
                f"OmniBal, Table {number}: GPU days", f"§5.3, page {page}", "A100 days per epoch",
                tuple(Row(name, paper, raymm[name]) for name, paper in printed.items()), MISSING,
            ),
            Table(
                f"OmniBal, Table {number}: gain", f"§5.3, page {page}", f"GPU days over {unit!r}",
                tuple(
                    Row(name, round(paper / printed[unit], 4), raymm[name] / raymm[unit])
                    for name, paper in printed.items() if name != unit
                ),
                MISSING,
            ),
        ]
    return found
