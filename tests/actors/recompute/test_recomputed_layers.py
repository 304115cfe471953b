"""Recomputed blocks: bitwise equal results, and less memory."""

import pytest
import torch

from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.errors import PlanError
from raymm.kernels.hf import self_attention as hf_attention
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.recomputation import OPTIONS
from raymm.scheduler.plan.plan import Plan
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_training, oracle_of


def model_of(llm=None, mask=None) -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(llm or pm.qwen3(), 3)), mask=mask,
    )


def step() -> list[dict]:
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([6], 5)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", [None, "multimodal"])
def test_recomputation_is_bitwise_equal_with_less_memory(option, mask):
    """Compare in one process, with dropout, with torch's attention and raymm's."""
    config = pm.gpt2()
    config.resid_pdrop = 0.3
    found = {}
    for used in ("keep", option):
        model = model_of(config, mask).materialize()
        blocks = model.language_model.module.transformer.h
        model.language_model.module.train()
        if mask is not None:  # also after the forward, when the blocks run again
            hf_attention.register()
            model.language_model.module.set_attn_implementation(hf_attention.NAME)
        recompute_layers(list(blocks), [used] * len(blocks))
        held = 0

        def pack(tensor):
            nonlocal held
            held += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**step()[0])
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[used] = loss.item(), gradients, held
    (loss, gradients, held), (other, others, fewer) = found["keep"], found[option]
    assert loss == other and gradients.keys() == others.keys() and len(gradients) > 50
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert option == "keep" or fewer < held / 2


@pytest.mark.parametrize(
    ("option", "times"), [("keep", 1), ("matmuls", 1), ("attention", 1), ("all", 2)]
)
def test_kept_attention_is_not_recomputed(option, times, monkeypatch):
    """Check raymm's attention, which is a single operator for torch."""
    from raymm.kernels.flash.cpu import attention as attention_cpu

    model = model_of(mask="multimodal").materialize()
    hf_attention.register()
    llm = model.language_model.module
    llm.set_attn_implementation(hf_attention.NAME)
    llm.train()
    recompute_layers(list(llm.model.layers), [option] * 3)
    runs = []
    compute = attention_cpu.cpu_forward
    monkeypatch.setattr(attention_cpu, "cpu_forward", lambda *a: runs.append(1) or compute(*a))
    model(**step()[0]).backward()
    assert len(runs) == 3 * times


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("vision", "llm"),
    [
        (ParallelSpec(recompute_layers="all"),
         ParallelSpec(pp=2, recompute_layers=("matmuls", "all", "attention"))),
        (ParallelSpec(dp=2, ranks=(0, 1), recompute_layers="attention"),
         ParallelSpec(dp=2, cp=2, ranks=(2, 3), recompute_layers="matmuls")),
        (ParallelSpec(tp=2, recompute_layers="matmuls"),
         ParallelSpec(tp=2, cp=2, recompute_layers="attention")),
        (ParallelSpec(dp=2, sharding="fsdp", recompute_layers="all"),
         ParallelSpec(dp=2, sharding="fsdp", recompute_layers="matmuls")),
    ],
    ids=["pipeline", "copies-and-tokens", "tensors", "fully-sharded"],
)
def test_training(ray_cluster, vision, llm):
    model = model_of(mask="multimodal")
    oracle = oracle_of(model, visible=lambda q, k, past: past if q[0] == 0 else q[0] == k[0])
    spec = MultimodalParallelSpec({"vision": vision}, llm, 2)
    assert Plan.from_json(spec.plan(model).to_json()) == spec.plan(model)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()]])


def test_what_cannot_be_is_refused():
    model = model_of()

    def plan(schedule="1f1b", recompute=False, **llm):
        spec = MultimodalParallelSpec({}, ParallelSpec(**llm), 2, schedule, recompute)
        return spec.plan(model)

    for given in ("some", ("all", "keep"), ("all", "keep", "none")):
        with pytest.raises(PlanError, match="recompute_layers of 'llm' is .*each of its 3 blocks"):
            plan(recompute_layers=given)
    with pytest.raises(PlanError, match="has layer_options, but schedule is 'zero_bubble'"):
        plan("zero_bubble", recompute_layers="all")
    with pytest.raises(PlanError, match="layer_options and recompute"):
        plan(recompute=True, pp=2, recompute_layers="all")
    assert all(not stage.layer_options for stage in plan(recompute_layers=("keep",) * 3).stages)
