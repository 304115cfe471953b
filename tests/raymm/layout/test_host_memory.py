"""Host memory of copies: the plan's prediction equals real copies, files and nodes."""

from __future__ import annotations

import pytest
import ray
from safetensors.torch import load_file
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks.shared.image_text import microbatches
from raymm.actors.host.memory import CopyOptions, HostMemory, available_memory
from raymm.actors.optimizer.host_staging import CHUNK_BYTES
from raymm.actors.optimizer.optimizer_config import EmaConfig, OptimizerConfig
from raymm.actors.rank.rank_actor import RankActor
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import PlanError
from raymm.layout.host_memory import GIB, HostNeed, check_hosts, host_needs
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

VISION = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=8, vision_use_head=False,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=120, tie_word_embeddings=True,
)  # fmt: skip
BOTH = CopyOptions(True, True)
CASES = {
    "zero1": (ParallelSpec(dp=2, sharding="zero1"), OptimizerConfig(), "fp32", False),
    "fsdp, 8 bit": (
        ParallelSpec(dp=2, sharding="fsdp"), OptimizerConfig(name="adamw_8bit"), "fp32", True
    ),
    "tp, ema": (ParallelSpec(tp=2), OptimizerConfig(ema=EmaConfig(0.9)), "fp32", False),
    "muon, bf16 master, pp": (
        ParallelSpec(pp=2), OptimizerConfig(name="muon", parameters="bf16_master"), "bf16", False
    ),
}


TOKENS, ROWS = 8, 2


@pytest.mark.cells(2)
@pytest.mark.parametrize("case", CASES)
def test_copies_have_the_planned_bytes(ray_cluster, tmp_path, case) -> None:
    """Compare with a real checkpoint, in memory and in files, and with a real snapshot."""
    spec, optimizer, precision, frozen = CASES[case]
    vision = ModalityModule(VISION, "mlp", frozen=frozen, seed=1)
    model = MultimodalModule({"vision": vision}, ModalityModule(LLAMA, seed=2))
    plan = MultimodalParallelSpec({"vision": ParallelSpec()}, spec, 2).plan(model)
    batches = microbatches(2, ROWS, TOKENS, LLAMA.vocab_size, VISION.image_size)
    with ParallelModel(
        model, plan, optimizer=optimizer, precision=precision, resources=RankResources(cpus=0.1)
    ) as parallel:
        parallel.train_step(batches)
        ranks = parallel.check_plan(model, plan, parallel.options)
        needs = host_needs(ranks, model, optimizer, BOTH, "cpu")
        copied = parallel.group.call("copy_state", parallel.reloadable())
        parallel.group.call("write_copy", str(tmp_path))
        parallel.group.call("copy_snapshot")
        handed = parallel.group.start("hand_over_snapshot", returns=2)
        snapshots = [ray.get(part) for _, part in handed]
    assert [need.checkpoint for need in needs] == copied
    assert sum(copied) == sum(
        tensor.nbytes for file in tmp_path.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    taken = [
        sum(tensor.data.nbytes for part in (s.trained, s.optimizer) for tensor in part.values())
        for s in snapshots
    ]
    assert [need.snapshot for need in needs] == taken


def test_pinned_memory_is_counted_on_gpus_only() -> None:
    model = MultimodalModule({}, ModalityModule(LLAMA, seed=2))
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2).plan(model)
    ranks = ParallelModel.check_plan(model, plan, RuntimeOptions())
    for copies in (BOTH, CopyOptions(True, False), CopyOptions(False, True), CopyOptions()):
        for need in host_needs(ranks, model, OptimizerConfig(), copies, "cuda"):
            assert need.pinned == min(max(need[:2]), 2 * CHUNK_BYTES)
            assert (need.checkpoint > 0, need.snapshot > 0) == tuple(copies)
        assert not any(n.pinned for n in host_needs(ranks, model, OptimizerConfig(), copies, "cpu"))


def test_nodes_without_memory_are_refused_by_name() -> None:
    """Use ranks on two nodes, each with a part of the other's snapshots."""
    needs = [HostNeed(6 * GIB, 2 * GIB, GIB), HostNeed(6 * GIB, 4 * GIB, GIB)]
    one = [HostMemory("a", "host-a", 32 * GIB)] * 2
    check_hosts(needs, one)  # 12 + 3 * (2 + 4) + 2
    two = [HostMemory("a", "host-a", 21 * GIB), HostMemory("b", "host-b", 23 * GIB)]
    check_hosts(needs, two)  # 6 + 3 * 2 + 2 * 4 + 1, and 6 + 3 * 4 + 2 * 2 + 1
    for number, message in (
        (0, r"processes 0, 1 on host-a need 32\.00 GiB .*: 12\.00 GiB of asynchronous checkpoints "
            r"\(run\.asynchronous_checkpoints\), 18\.00 GiB of snapshots \(run\.snapshot_every\), "
            r"2\.00 GiB of pinned memory; 31\.99 GiB are available"),
    ):
        short = [h._replace(available=h.available - 2**23) for h in one]
        with pytest.raises(PlanError, match=message):
            check_hosts(needs, short[number:])
    for number, name in enumerate(("host-a", "host-b")):
        short = list(two)
        short[number] = short[number]._replace(available=two[number].available - 1)
        with pytest.raises(PlanError, match=f"processes {number} on {name}"):
            check_hosts(needs, short)


def test_a_run_is_refused_before_its_first_step(ray_cluster, monkeypatch) -> None:
    """Compare with the memory of the nodes."""
    model = MultimodalModule({}, ModalityModule(LLAMA, seed=2))
    plan = MultimodalParallelSpec({}, ParallelSpec(), 2).plan(model)
    monkeypatch.setattr(RankGroup, "actor_class", RankWithoutMemory)
    with pytest.raises(PlanError, match=r"on host-a need .* 1,000 bytes are available"):
        ParallelModel(model, plan, copies=CopyOptions(checkpoints=True))


class RankWithoutMemory(RankActor):
    """Rank on a node with little free memory."""

    def host_memory(self) -> HostMemory:
        return HostMemory("a", "host-a", 1000)


def test_a_container_has_its_control_groups_memory(tmp_path) -> None:
    all_of_it = available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\n")
    assert all_of_it / 2 < available_memory(tmp_path) < all_of_it * 2
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(tmp_path) == 550
