"""Cornstarch v1: modality parallelism, frozen-aware pipelines and token distribution on A40s.

Models, tokens and stage counts are those of :mod:`benchmarks.valm_configs`. A stage is a rank of
``tp`` x ``cp`` A40s, four per node, whose communication counts (:func:`process_profile`). Language
model stages recompute, as in the paper's Figure 3; the schedule is 1F1B.

- *Modality parallel*: each encoder has separate stages.
- *Colocated*: both encoders are cut into equally many stages; stage i of each runs on one rank.
- *Replicated*: every language model stage runs all encoders before it.

The printed throughputs are about eight times those of the paper's own stage times (Table 3: 24
microbatches of one sample, 1F1B, two GPUs per stage), so their unit is not known and all
throughputs are compared relative to the mean of their table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks import token_distribution
from benchmarks.baselines.parametric_partition import partition_layers
from benchmarks.baselines.pipelines import unaware_work
from benchmarks.papers.tables import Row, Table, paired, relative
from benchmarks.shared.paper_rows import ENCODER, ROWS, table_plan
from benchmarks.shared.token_policies import POLICIES
from benchmarks.valm_configs import (
    AUDIO_TOKENS,
    DEVICE,
    DTYPE,
    IMAGE_TOKENS,
    MICROBATCHES,
    TEXT_TOKENS,
    VALM_CONFIGS,
    module_costs,
    projector_costs,
)
from raymm.scheduler.context_parallel.distribution import distribute
from raymm.scheduler.costs.devices import DEVICES, Links
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import forecast, iteration_time
from raymm.scheduler.schedule.network import edge_transfers
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.module_degrees import ModuleDegrees, make_plan, process_profile
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import StageSpace

PER_NODE = 4
COLOCATED, LLM = "encoders", "llm"
TOKENS = {"vision": IMAGE_TOKENS, "audio": AUDIO_TOKENS}
UNIT = "samples per microbatch, or the unit of the throughput"
SIZES = "image and audio tokens, feed-forward widths"

# §6.3, Appendix C: colocated (LLM, encoders, inputs/s), modality parallel (LLM, V, A, inputs/s).
_NAMES = ("SS", "SM", "SL", "MS", "MM", "ML", "LS", "LM", "LL")
TABLE_2 = (
    ((6, 1, 3.09), (6, 1, 1, 2.68)), ((6, 2, 2.64), (6, 1, 1, 2.73)),
    ((6, 2, 2.57), (6, 1, 2, 2.25)), ((6, 2, 2.57), (6, 2, 1, 2.29)),
    ((6, 3, 2.21), (6, 1, 1, 2.22)), ((6, 4, 1.91), (6, 2, 2, 2.05)),
    ((6, 4, 1.95), (6, 3, 1, 1.92)), ((6, 4, 1.88), (6, 3, 1, 1.97)),
    ((6, 5, 1.74), (6, 3, 2, 1.82)),
)
TABLE_7 = (
    ((3, 4, 6.31), (3, 1, 1, 8.82)), ((1, 3, 5.20), (3, 1, 4, 4.99)),
    ((1, 4, 4.31), (3, 1, 5, 4.61)), ((2, 4, 5.18), (3, 3, 1, 5.24)),
    ((1, 4, 3.93), (3, 2, 3, 4.66)), ((1, 5, 3.40), (3, 2, 4, 3.78)),
    ((1, 4, 3.82), (3, 5, 1, 3.96)), ((1, 6, 2.96), (2, 4, 3, 3.42)),
    ((1, 6, 2.76), (2, 3, 3, 3.25)),
)
TABLE_8 = (
    ((5, 1, 1.57), (5, 1, 1, 1.33)), ((5, 2, 1.37), (5, 1, 1, 1.36)),
    ((5, 2, 1.33), (5, 1, 1, 1.37)), ((4, 1, 1.57), (5, 1, 1, 1.37)),
    ((4, 2, 1.32), (5, 1, 1, 1.37)), ((6, 1, 1.04), (5, 1, 1, 0.93)),
    ((4, 2, 1.31), (5, 1, 1, 1.36)), ((4, 3, 1.10), (5, 1, 1, 1.33)),
    ((4, 3, 1.09), (5, 1, 1, 1.36)),
)
# Table 3: inputs/s per GPU, (aware, unaware).
TABLE_3 = {
    "VLM-S": (6.47, 5.30), "VLM-M": (5.15, 3.73), "ALM-S": (1.94, 1.94),
    "ALM-M": (1.96, 1.70), "VLM-L": (3.17, 2.06), "ALM-L": (1.98, 1.69),
}
# Table 4: milliseconds with LPT, random, naive ring and zigzag, by length and mask.
TABLE_4 = {
    ("16k", "ep"): (3.92, 3.93, 4.24, 3.96), ("16k", "ee"): (4.31, 4.32, 4.86, 4.37),
    ("16k", "mp"): (3.00, 2.99, 3.12, 3.08), ("32k", "ep"): (10.01, 10.07, 11.76, 10.21),
    ("32k", "ee"): (11.12, 11.12, 13.43, 11.60), ("32k", "mp"): (6.09, 6.18, 6.76, 6.57),
    ("64k", "ep"): (25.43, 25.48, 32.24, 28.17), ("64k", "ee"): (36.99, 37.12, 46.67, 37.36),
    ("64k", "mp"): (14.18, 14.15, 16.56, 15.33),
}
POLICY_NAMES = ("lpt", "random", "contiguous", "zigzag")
TABLE_4_RANKS, TABLE_4_MASKS = 8, 50
# Appendix B, Table 5: stages (LLM, encoder) of colocated and Cornstarch's pipelines, medium LLM.
TABLE_5 = {
    "VLM-S": ((3, 1), (5, 1)), "VLM-M": ((3, 2), (3, 1)), "VLM-L": ((2, 3), (3, 2)),
    "ALM-S": ((4, 2), (5, 1)), "ALM-M": ((3, 3), (4, 2)), "ALM-L": ((2, 4), (4, 2)),
}
# §6.2: largest gain over both baselines; VALM-MM's gain over the colocated pipeline (medium LLM);
# VLM-S's iteration over the colocated one's.
LARGEST_GAIN, VALM_MM_GAIN, VLM_S_TIME = 1.57, 1.44, 0.87
REPLICATED_STAGES = 6


@cache
def profile(llm: str, vision: str, audio: str, tp: int, cp: int) -> tuple[ModuleGraph, CostProfile]:
    """Return graph and costs per process of a model in which only projectors are trained.

    Args:
        llm: size of the language model, ``"S"``, ``"M"`` or ``"L"``.
        vision, audio: sizes of the encoders; empty for none.
    """
    sizes = {kind: size for kind, size in (("vision", vision), ("audio", audio)) if size}
    modules = {
        kind: module_costs(kind, size, tp=1, cp=1) + projector_costs(kind, size, llm, tp=1, cp=1)
        for kind, size in sizes.items()
    }
    tokens = TEXT_TOKENS + sum(TOKENS[kind] for kind in sizes)
    modules[LLM] = module_costs(LLM, llm, tokens, tp=1, cp=1)
    nodes = tuple(
        ModuleNode(name, (False,) * (len(costs) - 1) + (name != LLM,), projector=name != LLM)
        for name, costs in modules.items()
    )
    graph = ModuleGraph(nodes, tuple((kind, LLM) for kind in sizes))
    device = DEVICES[DEVICE]
    links = Links(device.within_node, device.across_nodes, PER_NODE)
    whole = CostProfile(modules, DEVICE, DTYPE, "analytic", links=links)
    degrees = ModuleDegrees(cp=cp, tp=tp)
    return graph, process_profile(graph, whole, {name: degrees for name in modules})


def seconds(plan: Plan, processes: int) -> float:
    """Return the simulated seconds of a step of ranks with so many processes each."""
    device = DEVICES[DEVICE]
    sizes = {
        stage: replace(cost, output_bytes=cost.output_bytes // processes)
        for stage, cost in stage_costs(plan).items()
    }
    per_node = max(1, PER_NODE // processes)
    transfers = edge_transfers(plan, device.within_node, device.across_nodes, per_node, sizes)
    return forecast(plan, transfers).seconds


def modality_parallel(
    graph: ModuleGraph, costs: CostProfile, counts: Mapping[str, int], expected=None
) -> Plan:
    """Return the plan with so many balanced stages per module. ``expected`` is the work that stages
    balance, by default their real work."""
    space = StageSpace(
        graph, costs, sum(counts.values()), MICROBATCHES, recompute=True, recompute_loss=True,
        expected=expected,
    )
    return space.plan(counts)


def colocated(graph: ModuleGraph, costs: CostProfile, llm: int, encoders: int) -> Plan:
    """Return the plan whose encoder stage i has stage i of every encoder, cut by forward time."""
    kinds = [node.name for node in graph.nodes if node.name != LLM]
    chunks = [
        sum_costs([
            layer for kind in kinds for layer in costs.modules[kind][slice(*cuts[kind][i])]
        ])
        for cuts in [{
            kind: partition_layers([c.forward for c in costs.modules[kind][:-1]], encoders)
            for kind in kinds
        }]
        for i in range(encoders)
    ]
    modules = {
        COLOCATED: (*chunks, sum_costs([costs.modules[kind][-1] for kind in kinds])),
        LLM: costs.modules[LLM],
    }
    nodes = (
        ModuleNode(COLOCATED, (False,) * encoders + (True,), projector=True), graph.node(LLM)
    )
    merged = ModuleGraph(nodes, ((COLOCATED, LLM),))
    partitions = {
        COLOCATED: tuple((i, i + 1 + (i + 1 == encoders)) for i in range(encoders)),
        LLM: partition_layers([c.forward for c in costs.modules[LLM]], llm),
    }
    own = replace(costs, modules=modules, links=None)
    return make_plan(merged, partitions, MICROBATCHES, "1f1b", own, True, recompute_loss=True)


def replicated(graph: ModuleGraph, costs: CostProfile, llm: int) -> Plan:
    """Return the plan whose language model stages run all encoders before them."""
    kinds = [node.name for node in graph.nodes if node.name != LLM]
    encoder = sum_costs([layer for kind in kinds for layer in costs.modules[kind]])
    projectors = sum(costs.modules[kind][-1].backward_weight for kind in kinds)
    stages = []
    for lo, hi in partition_layers([c.forward for c in costs.modules[LLM]], llm):
        own = sum_costs(costs.modules[LLM][lo:hi])
        stages.append(replace(
            own, forward=encoder.forward + own.forward, backward_input=0.0,
            # A recomputation and the gradient, neither of them of the frozen encoders.
            backward_weight=own.forward + own.backward_input + projectors,
        ))
    chain = ModuleGraph((ModuleNode(LLM, (True,) * llm),), ())
    partitions = {LLM: tuple((i, i + 1) for i in range(llm))}
    own = replace(costs, modules={LLM: tuple(stages)}, links=None)
    return make_plan(chain, partitions, MICROBATCHES, "1f1b", own)


def sum_costs(layers: list[LayerCost] | tuple[LayerCost, ...]) -> LayerCost:
    """Return layers that run one after another as one layer; the last one's output is sent."""
    return LayerCost(
        *(sum(getattr(c, name) for c in layers)
          for name in ("forward", "backward_input", "backward_weight", "activation_bytes",
                       "parameter_bytes")),
        output_bytes=layers[-1].output_bytes,
    )


def throughput(plan: Plan, tp: int, cp: int) -> float:
    """Return the samples per second and GPU."""
    processes = tp * cp
    return MICROBATCHES / seconds(plan, processes) / (plan.num_ranks * processes)


def modality_tables(number: int, section: str, llm: str, figures, tp: int, cp: int) -> list[Table]:
    """Return the tables of modality parallel and colocated throughput with one LLM size."""
    rows = []
    for name, ((llm_c, encoders, tput_c), (llm_m, vision, audio, tput_m)) in zip(
        _NAMES, figures, strict=True
    ):
        graph, costs = profile(llm, *name, tp, cp)
        one = colocated(graph, costs, llm_c, encoders)
        other = modality_parallel(graph, costs, {"vision": vision, "audio": audio, LLM: llm_m})
        rows += [
            (f"VALM-{name}, colocated", tput_c, throughput(one, tp, cp)),
            (f"VALM-{name}, modality parallel", tput_m, throughput(other, tp, cp)),
        ]
    return [
        Table(
            f"Cornstarch v1, Table {number}: throughput", section,
            "inputs/s per GPU over the table's geometric mean", relative(rows),
            f"{UNIT}; {SIZES}",
        ),
        Table(
            f"Cornstarch v1, Table {number}: gain", section,
            "throughput per GPU, modality parallel over colocated",
            paired(rows, lambda name: name.split(",")[0]), SIZES,
        ),
    ]


def frozen_aware_tables() -> list[Table]:
    """Return Table 3, with the stage counts that its times imply
    (:mod:`benchmarks.shared.paper_rows`)."""
    rows, times = [], []
    for row in ROWS:
        if row.name not in TABLE_3:
            continue
        kind, size = ("vision" if row.name[0] == "V" else "audio"), row.name[-1]
        sizes = {"vision": "", "audio": "", kind: size}
        graph, costs = profile("M", sizes["vision"], sizes["audio"], 2, 1)
        for aware, paper in zip((False, True), reversed(TABLE_3[row.name]), strict=True):
            printed, counts = row.variant(aware)
            expected = None if aware else unaware_work(graph, costs)
            stages = {kind: counts.encoder, LLM: counts.llm}
            plan = modality_parallel(graph, costs, stages, expected)
            label = "aware" if aware else "unaware"
            rows.append((f"{row.name}, {label}", paper, throughput(plan, 2, 1)))
            times += _stage_times(f"{row.name}, {label}", plan, kind, printed._asdict())
    source = "§6.4"
    return [
        Table(
            "Cornstarch v1, Table 3: throughput", source,
            "inputs/s per GPU over the table's geometric mean", relative(rows), f"{UNIT}; {SIZES}",
        ),
        Table(
            "Cornstarch v1, Table 3: gain", source, "throughput per GPU, aware over unaware",
            paired(rows, lambda name: name.split(",")[0]), SIZES,
        ),
        stage_time_table(),
        Table(
            "Cornstarch v1, Table 3: stage times", source, "mean ms per stage", tuple(times), SIZES,
        ),
    ]


def stage_time_table() -> Table:
    """Return Table 3's throughputs, simulated from its own stage times on two GPUs per stage."""
    rows = []
    for row in ROWS:
        for aware in (False, True) if row.name in TABLE_3 else ():
            plan = table_plan(row, 1e-3, aware, "1f1b")
            label, paper = ("aware", "unaware")[not aware], TABLE_3[row.name][not aware]
            own = MICROBATCHES / iteration_time(plan) / plan.num_ranks / 2
            rows.append((f"{row.name}, {label}", paper, own))
    return Table(
        "Cornstarch v1, Table 3: throughput of its stage times", "§6.4",
        "inputs/s per GPU over the table's geometric mean", relative(rows), UNIT,
    )


def _stage_times(
    name: str, plan: Plan, kind: str, printed: Mapping[str, float]
) -> Iterator[Row]:
    costs = stage_costs(plan)
    for module, label in ((kind, ENCODER), (LLM, LLM)):
        found = [costs[stage.id] for stage in plan.module_stages(module)]
        forward = statistics.fmean(c.forward for c in found)
        yield Row(f"{name}, {label} forward", printed[f"{label}_forward"], forward * 1e3)
        if module == LLM:
            backward = forward + statistics.fmean(c.backward_input for c in found)
            yield Row(f"{name}, {label} backward", printed[f"{label}_backward"], backward * 1e3)


def end_to_end_tables() -> list[Table]:
    """Return the figures of Figures 9 and 10 that the text prints, and the planner's Table 6."""
    gains: dict[str, float] = {}
    times: dict[str, float] = {}
    for name, ((llm_c, encoders), (llm_m, encoder)) in TABLE_5.items():
        kind, size = ("vision" if name[0] == "V" else "audio"), name[-1]
        sizes = {"vision": "", "audio": "", kind: size}
        graph, costs = profile("M", sizes["vision"], sizes["audio"], 2, 2)
        own = modality_parallel(graph, costs, {kind: encoder, LLM: llm_m})
        other = colocated(graph, costs, llm_c, encoders)
        gains |= _gains(name, graph, costs, own, other)
        times[name] = seconds(own, 4) / seconds(other, 4)
    for config in VALM_CONFIGS:
        if config.llm != "M":
            continue
        graph, costs = profile("M", config.vision, config.audio, 2, 2)
        llm, vision, audio = config.cornstarch
        own = modality_parallel(graph, costs, {"vision": vision, "audio": audio, LLM: llm})
        other = colocated(graph, costs, *config.colocated)
        gains |= _gains(f"VALM-{config.vision}{config.audio}", graph, costs, own, other)
    missing = "bars of all models (the text prints three figures)"
    return [Table(
        "Cornstarch v1, Figures 9 and 10: gain", "§6.2", "Cornstarch over the named baseline",
        (
            Row("largest throughput gain over either baseline", LARGEST_GAIN, max(gains.values())),
            Row("VALM-MM, throughput over colocated", VALM_MM_GAIN, gains["VALM-MM, colocated"]),
            Row("VLM-S, iteration time over colocated", VLM_S_TIME, times["VLM-S"]),
        ),
        f"{missing}; {SIZES}",
    )]


def _gains(
    name: str, graph: ModuleGraph, costs: CostProfile, own: Plan, other: Plan
) -> dict[str, float]:
    best = throughput(own, 2, 2)
    chain = replicated(graph, costs, REPLICATED_STAGES)
    return {
        f"{name}, colocated": best / throughput(other, 2, 2),
        f"{name}, replicated": best / throughput(chain, 2, 2),
    }


def planner_table() -> Table:
    """Return the steps of Table 6's plans over those of the planner's, on as many ranks."""
    rows = []
    for config in VALM_CONFIGS:
        graph, costs = profile(config.llm, config.vision, config.audio, 2, 2)
        llm, vision, audio = config.cornstarch
        space = StageSpace(
            graph, costs, sum(config.cornstarch), MICROBATCHES, recompute=True, recompute_loss=True
        )
        best = joint_search(space, iteration_time, lower_bound, alternatives=0).best
        printed = {"vision": vision, "audio": audio, LLM: llm}
        rows += [
            Row(f"{config.name}, {module} stages", count, best.counts[module])
            for module, count in printed.items()
        ]
    return Table(
        "Cornstarch v1, Table 6: stages", "Appendix B.1", "stages of the planner's plan",
        tuple(rows), SIZES,
    )


def token_table(masks: int = TABLE_4_MASKS) -> Table:
    """Return Table 4: attention time of a policy over that of LPT, by work of the slowest rank.

    All-gathered keys and values are hidden by compute (§5.3), so a rank's work is its time.
    """
    rows = []
    for (length, kind), printed in TABLE_4.items():
        tokens = int(length[:-1]) << 10
        slowest = np.zeros(len(POLICY_NAMES))
        for seed in range(masks):
            mask = token_distribution.PATTERNS[kind](tokens, np.random.default_rng(seed))
            work = token_distribution.count(mask)
            slowest += [
                max(distribute(work, TABLE_4_RANKS, POLICIES[policy]).work)
                for policy in POLICY_NAMES
            ]
        rows += [
            Row(f"{length}, {kind.upper()}, {policy}", round(printed[i] / printed[0], 4),
                slowest[i] / slowest[0])
            for i, policy in enumerate(POLICY_NAMES) if i
        ]
    return Table(
        "Cornstarch v1, Table 4: token distribution", "§6.5", "attention time over LPT's",
        tuple(rows),
        "density and distribution of the random masks, fixed cost of a kernel",
    )


def tables() -> list[Table]:
    """Return all tables of the paper."""
    return [
        *modality_tables(2, "§6.3", "M", TABLE_2, 2, 1),
        *modality_tables(7, "Appendix C", "S", TABLE_7, 2, 2),
        *modality_tables(8, "Appendix C", "L", TABLE_8, 2, 2),
        *frozen_aware_tables(),
        *end_to_end_tables(),
        planner_table(),
        token_table(),
    ]
