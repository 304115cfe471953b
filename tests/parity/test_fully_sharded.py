"""Modules whose processes deal samples out and keep a part of the parameters equal one process."""

import parity_models as pm
import pytest
from parity_check import OPTIMIZER, check_gradients, check_training, oracle_of

from raymm.model import ModalityModule, MultimodalModule
from raymm.scheduler.plan import PlanError
from raymm.specs import MultimodalParallelSpec, ParallelSpec


def fsdp(**degrees) -> ParallelSpec:
    return ParallelSpec(sharding="fsdp", **degrees)


def model_of(llm=None, vision=None, frozen=False) -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(vision or pm.siglip(), 1), "mlp", frozen=frozen)},
        ModalityModule(pm.build(llm or pm.llama(tied=True), 3)),
    )


def uneven() -> list[dict]:
    """Rows and items that do not divide, one row, one item, and only text."""
    return [
        pm.batch([17, 9, 5], 4, vision=[0, 0, 2]), pm.batch([6], 5), pm.batch([8, 3], 6, vision=[1]),
    ]


def block_elements(model: MultimodalModule, name: str) -> tuple[int, int]:
    """Elements in the blocks, and around them."""
    module = model.language_model.module if name == "llm" else model.encoders[name].module
    inside = sum(p.numel() for n, p in module.named_parameters() if ".layers." in n)
    projector = getattr(model.encoders.get(name), "projector", None)
    outside = sum(p.numel() for p in projector.parameters()) if projector is not None else 0
    return inside, outside + sum(p.numel() for p in module.parameters()) - inside


def check_everything(model, spec, steps) -> None:
    oracle = oracle_of(model)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, steps)
        check_gradients(parallel, oracle, steps[1:2], steps)  # only text, and gradients add up
        check_training(parallel, oracle, [[steps], [steps[::-1]], [steps, steps[:1]]])


def test_both_modules_and_a_projector(ray_cluster):
    """Every process has half of every block, and all of what is around them."""
    model = model_of()
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({"vision": fsdp(dp=2)}, fsdp(dp=2), 3)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        held = parallel.group.num_parameters
        for name in ("vision", "llm"):
            inside, outside = block_elements(model, name)
            parts = [part[f"{name}.0"] for part in held if f"{name}.0" in part]
            assert sum(parts) == inside + 2 * outside
            assert all(abs(part - outside - inside / 2) <= 0.02 * inside for part in parts)
        check_gradients(parallel, oracle, uneven())
        check_gradients(parallel, oracle, uneven()[1:2], uneven())  # only text; gradients add up
        check_training(parallel, oracle, [[uneven()], [uneven()[::-1]], [uneven(), uneven()[:1]]])


def test_shares_of_tokens_of_shares_of_samples(ray_cluster):
    """Two processes per sample; an encoder without gradients, sharded by tokens alone."""
    model = model_of(pm.qwen3(), frozen=True)
    spec = MultimodalParallelSpec({"vision": fsdp(cp=2)}, fsdp(dp=2, cp=2), 3)
    check_everything(model, spec, uneven())


@pytest.mark.parametrize("recompute", [False, True])
def test_pipelines(ray_cluster, recompute):
    """Tied embeddings at both ends; the projector on its own; several microbatches under way."""
    model = model_of()
    spec = MultimodalParallelSpec(
        {"vision": fsdp(dp=2, layers=(2, 1), pp=2)}, fsdp(pp=2, dp=2), 3, recompute=recompute
    )
    check_everything(model, spec, uneven())


def test_modules_on_the_same_ranks(ray_cluster):
    """Encoder and language model take turns; first dimensions that do not divide by three."""
    model = model_of(pm.gpt2(), pm.clip())
    one = fsdp(dp=3, ranks=(0,))
    check_everything(model, MultimodalParallelSpec({"vision": one}, one, 3), uneven())
