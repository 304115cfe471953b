"""Claim: the planner plans for up to 10,240 devices within CPU minutes.

Run with `python -m benchmarks.planner_scale --devices 64,256 --json`.

The model is a language model of 70 billion parameters with a vision encoder of 6 billion, all
trained, on 64 to 10,240 H100. Figures per number of devices: CPU seconds of the search (degrees,
memory, recomputation, all layouts and schedules, on one core), predicted seconds of a step, the
model's share of the devices' peak in it (MFU, without recomputation), and the remaining shares:
matrix products below the peak, communication and recomputation within a stage, and the rest,
bubbles and messages.
"""

from __future__ import annotations

import time

from benchmarks.shared import common
from raymm.actors.modules.projector import Projector, ProjectorConfig
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_layers, projector_layers
from raymm.costs.load import Load
from raymm.scheduler.costs.device_memory import usable_bytes
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import busiest_rank
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import find_plans

DEVICE, DTYPE, PER_NODE = "H100", "bf16", 8
TOKENS, LABELS, IMAGES, IMAGE_TOKENS = 8192, 4096, 4, 1025
# Microbatches of a step, one sample each: at most 16 million tokens.
MOST_MICROBATCHES = 2048


def main() -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--devices", default="64,256", help="comma-separated numbers of devices")
    args = options.parse_args()
    console = common.console()
    graph, profile = model()
    result: dict[str, object] = {"machine": common.machine()}
    for devices in map(int, args.devices.split(",")):
        row = plan(graph, profile, devices)
        for key, value in row.items():
            result[f"{key}_{devices}"] = value
            console.print(f"{key + '_' + str(devices):36} {value}", highlight=False)
    common.emit(result, args.json)


def model() -> tuple[ModuleGraph, CostProfile]:
    """Return Llama 3 70B's shape, and InternViT 6B's with a linear projector."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

    language = ConfigSource(LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    )).skeleton()
    vision = ConfigSource(CLIPVisionModel, CLIPVisionConfig(
        num_hidden_layers=45, hidden_size=3200, intermediate_size=12800, num_attention_heads=25,
        image_size=448, patch_size=14,
    )).skeleton()
    with torch.device("meta"):
        projector = Projector(ProjectorConfig("linear", 3200, 8192))
    images = Load(IMAGES, IMAGE_TOKENS)
    modules = {
        "vision": analytic_layers(vision, images, DEVICE, DTYPE)
        + projector_layers(projector, images, DEVICE, DTYPE),
        "llm": analytic_layers(
            language, Load(1, TOKENS, labels=LABELS), DEVICE, DTYPE, causal=True
        ),
    }
    nodes = tuple(
        ModuleNode(name, (True,) * len(layers), projector=name == "vision")
        for name, layers in modules.items()
    )
    tokens = {"vision": images.total, "llm": TOKENS}
    return (
        ModuleGraph(nodes, (("vision", "llm"),)),
        CostProfile(modules, DEVICE, DTYPE, "analytic", tokens),
    )


def plan(graph: ModuleGraph, profile: CostProfile, devices: int) -> dict[str, float | str]:
    """Return one row."""
    device, microbatches = find_device(DEVICE), min(devices, MOST_MICROBATCHES)
    powers = [1 << power for power in range(devices.bit_length())]
    choices = {
        name: DegreeChoices(
            tuple(n for n in powers if n <= PER_NODE),
            tuple(n for n in powers if n <= tokens // 1024),
            tuple(n for n in powers if microbatches % n == 0),
        )
        for name, tokens in profile.tokens.items()
    }
    problem = PlanProblem(
        graph=graph, profile=profile, ranks=devices, num_microbatches=microbatches,
        memory_limit=usable_bytes(device),
        network=Network(device.within_node, device.across_nodes, PER_NODE), degrees=choices,
    )
    start = time.process_time()
    best = find_plans(problem).best
    searched = time.process_time() - start
    # Seconds per step and device, at the achieved rate of products.
    work = sum(w.total for layers in layer_work(graph, profile).values() for w in layers)
    ideal = microbatches * work / devices
    return {
        "search_cpu_s": round(searched, 1),
        "step_s": round(best.seconds, 4),
        "mfu": round(device.efficiency * ideal / best.seconds, 4),
        "busiest_stage_share": round(busiest_rank(best.plan)[1] / best.seconds, 4),
        "ideal_share": round(ideal / best.seconds, 4),
        "plan": best.label,
    }


if __name__ == "__main__":
    main()
