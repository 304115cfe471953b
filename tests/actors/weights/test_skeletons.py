"""Skeletons are built once per source, and nothing that reads them changes them."""

import copy
import pickle

import pytest
import transformers
from torch import nn
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks._family_classes import Family
from benchmarks._vlm_check import runnable
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.weights.source import ConfigSource, FactorySource, LiveSource, ModuleSource
from raymm.costs.step_flops import StepFlops
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import FROZEN, from_pretrained
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

VISION = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=8, vision_use_head=False,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=120,
)  # fmt: skip
SPECS = [
    MultimodalParallelSpec({"vision": ParallelSpec(pp=2)}, ParallelSpec(pp=2), 4),
    MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(tp=2), 4),
    MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(dp=2, sharding="fsdp"), 4),
]


def structure(module: nn.Module) -> list[tuple]:
    """Return everything about a skeleton that a caller could change."""
    return [
        *((name, type(child), child.training, *vars(child)) for name, child in
          module.named_modules()),
        *((name, p.requires_grad, p.device, p.shape, p._version) for name, p in
          [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]),
        repr(getattr(module, "config", None)),
    ]  # fmt: skip


@pytest.fixture
def built(monkeypatch):
    """Return the skeletons that the test built, each with its structure at that time."""
    skeletons: dict[int, tuple[nn.Module, list[tuple]]] = {}
    shared = ModuleSource.skeleton

    def noted(source: ModuleSource) -> nn.Module:
        module = shared(source)
        skeletons.setdefault(id(module), (module, structure(module)))
        return module

    monkeypatch.setattr(ModuleSource, "skeleton", noted)
    return skeletons


def siglip_and_llama(lora: bool) -> MultimodalModule:
    adapters = {"lora": LoraConfig(targets=("q_proj",))} if lora else {}
    vision = ModalityModule(VISION, "mlp", frozen=True, seed=1)
    return MultimodalModule({"vision": vision}, ModalityModule(LLAMA, seed=2, **adapters))


@pytest.mark.parametrize("lora", [False, True])
def test_planning_does_not_change_skeletons(built, lora):
    model = siglip_and_llama(lora)
    for spec in SPECS:
        plan = spec.plan(model)
        ParallelModel.check_plan(model, plan, RuntimeOptions(optimizer=OptimizerConfig()))
    StepFlops(model)
    # Few: one per source, not one per question.
    assert 0 < len(built) <= 8
    for module, before in built.values():
        assert structure(module) == before


def test_parts_of_a_vlm_do_not_change_their_model(built):
    model_class = transformers.Idefics3ForConditionalGeneration
    config, batches = runnable(Family("whole model", model_class, model_class.config_class))
    config.architectures = [model_class.__name__]
    model = from_pretrained(config, batches[0], {"vision": FROZEN}, seed=1)
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2).plan(model)
    ParallelModel.check_plan(model, plan, RuntimeOptions())
    model.materialize()
    for module, before in built.values():
        assert structure(module) == before


def test_a_new_skeleton_is_the_callers_own():
    for source in (
        ConfigSource(transformers.LlamaForCausalLM, LLAMA),
        LiveSource.of(nn.Linear(2, 2)),
        FactorySource("torch.nn:Linear", {"in_features": 2, "out_features": 2}),
    ):
        before = structure(source.skeleton())
        assert source.skeleton() is source.skeleton()
        source.new_skeleton().requires_grad_(False).eval().extra = 1
        assert structure(source.skeleton()) == before
        for other in (pickle.loads(pickle.dumps(source)), copy.deepcopy(source)):
            assert other.skeleton() is not source.skeleton()
            assert structure(other.skeleton())[0][:3] == before[0][:3]


def test_freezing_gives_another_source():
    module = ModalityModule(VISION, "mlp", seed=1)
    assert module.source() is module.source()
    assert module.source().trains
    module.freeze()
    assert not module.source().trains
    module.freeze(module=False)
    assert module.source().trains
