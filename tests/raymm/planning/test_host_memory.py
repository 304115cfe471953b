"""Host memory of plans: equal to that of the ranks' own stages, shown, and refused by node."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.host.memory import CopyOptions, HostMemory, available_memory
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.costs.analytic import analytic_profile
from raymm.costs.load import Load
from raymm.errors import PlanError
from raymm.layout.host_memory import GIB, HostNeed, host_needs
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import from_pretrained
from raymm.planning.host_memory import PlannedHosts, cluster_hosts
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, vlm_plan
from raymm.scheduler.costs.recomputation import OFFLOAD

VISION = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=8, vision_use_head=False,
)  # fmt: skip
LLAMA: dict = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120,
}
BOTH = CopyOptions(True, True)
ADAMW = OptimizerConfig()
CASES = {
    "pp, tied": (ParallelSpec(pp=2), ParallelSpec(pp=2), True, {}, ADAMW),
    "pp, dp, adapters": (
        ParallelSpec(), ParallelSpec(pp=2, dp=2), False, {"lora": LoraConfig(r=4)}, ADAMW
    ),
    "zero1, frozen encoder": (
        ParallelSpec(), ParallelSpec(dp=2, sharding="zero1"), True, {}, ADAMW
    ),
    "fsdp, 8 bit": (
        ParallelSpec(), ParallelSpec(dp=2, sharding="fsdp"), False, {},
        OptimizerConfig(name="adamw_8bit"),
    ),
    "tp": (ParallelSpec(tp=2), ParallelSpec(pp=2, tp=2), False, {}, ADAMW),
    "muon, bf16 master": (
        ParallelSpec(pp=2), ParallelSpec(pp=4), False, {},
        OptimizerConfig(name="muon", parameters="bf16_master"),
    ),
}


def vlm(tied=False, frozen=False, **options):
    language = LlamaConfig(**LLAMA, tie_word_embeddings=tied)
    return MultimodalModule(
        {"vision": ModalityModule(VISION, "mlp", frozen=frozen, seed=1)},
        ModalityModule(language, seed=2, **options),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_needs_what_its_ranks_need(case, device) -> None:
    """Compare with the stages that ranks build, which are found by probes."""
    vision, llm, tied, options, optimizer = CASES[case]
    model = vlm(tied, "frozen" in case, **options)
    plan = MultimodalParallelSpec({"vision": vision}, llm, 4).plan(model)
    precision = "bf16" if optimizer.parameters != "fp32" else "fp32"
    ranks = ParallelModel.check_plan(
        model, plan, RuntimeOptions(optimizer=optimizer, precision=precision)
    )
    planned = PlannedHosts.of(model, plan, optimizer, BOTH, device, 2)
    assert planned.needs == host_needs(ranks, model, optimizer, BOTH, device)
    assert sum(need.checkpoint for need in planned.needs) > 0


@pytest.mark.cells(1)
@pytest.mark.parametrize("family", ["Gemma3", "Llava"])
def test_a_whole_model_needs_what_its_ranks_need(family) -> None:
    name = f"{family}ForConditionalGeneration"
    model_class = getattr(transformers, name)
    config, (microbatch, *_) = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    model = from_pretrained(config, microbatch)
    plan = vlm_plan(model, {"llm": ParallelSpec(pp=2, dp=2), "vision": ParallelSpec(tp=2)})
    ranks = ParallelModel.check_plan(model, plan, RuntimeOptions())
    planned = PlannedHosts.of(model, plan, ADAMW, BOTH, "cpu", 8)
    assert planned.needs == host_needs(ranks, model, ADAMW, BOTH, "cpu")


def test_offloaded_activations_count_while_microbatches_wait() -> None:
    model = vlm()
    profile = analytic_profile(model, {"llm": Load(2, 512), "vision": Load(2, 8)}, "H100", "bf16")
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec()}, ParallelSpec(pp=2, recompute_layers=OFFLOAD), 3,
        schedule="gpipe",
    )
    plan = replace(spec.plan(model), profile=profile)
    planned = PlannedHosts.of(model, plan, ADAMW, CopyOptions(), "cuda", 8)
    for stage in plan.module_stages("llm"):
        layers = profile.modules["llm"][slice(*stage.layers)]
        moved = sum(
            layer.activation_bytes - option.nbytes
            for layer in layers for option in layer.options if option.name == OFFLOAD
        )
        assert moved > 0
        assert planned.needs[stage.rank] == HostNeed(offloaded=3 * moved)
    assert planned.needs[plan.module_stages("vision")[0].rank] == HostNeed()


def test_rows_show_each_node_and_join_equal_ones() -> None:
    """Give every node three snapshots of its process, and two of the previous node's."""
    needs = [HostNeed(GIB, GIB // 2, GIB // 4, GIB)] * 4 + [HostNeed(2 * GIB)]
    rows = [tuple(row.values()) for row in PlannedHosts(tuple(needs), 1).rows()]
    assert rows == [
        ("0", "0", "1.00", "1.50", "0.25", "1.00", "3.75"),
        ("1-3", "1-3", "1.00", "2.50", "0.25", "1.00", "4.75"),
        ("4", "4", "2.00", "1.00", "0.00", "0.00", "3.00"),
    ]


def test_nodes_are_compared_in_order_of_size() -> None:
    """Use two nodes; the second needs more."""
    planned = PlannedHosts((HostNeed(GIB), HostNeed(3 * GIB)), 1)
    large, small = HostMemory("a", "large", 3 * GIB), HostMemory("b", "small", GIB)
    planned.check([small, large])
    planned.check([large])  # the other node is not known yet
    planned.check([])
    with pytest.raises(PlanError, match=r"processes 1 on large need 3\.00 GiB of host memory"):
        planned.check([small, large._replace(available=3 * GIB - 1)])
    with pytest.raises(PlanError, match="processes 0 on small"):
        planned.check([small._replace(available=GIB - 1), large])


def test_nodes_of_a_cluster_report_their_memory(ray_cluster) -> None:
    (host,) = cluster_hosts("cpu")
    assert host.available > 0 and available_memory() / 4 < host.available < available_memory() * 4
    assert cluster_hosts("cuda") == []
