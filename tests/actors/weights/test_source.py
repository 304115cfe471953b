"""Sources of weights: configs, factories, checkpoint folders; precision; skeletons."""

import copy
import pickle

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
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
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, close, oracle_of

CUT = ParallelSpec(pp=2, ranks=(0, 1))
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


def assert_same_bits(parallel, model):
    """Check that every parameter on the ranks equals that of the whole model in this process."""
    mine = parallel.parameters(trainable_only=False)
    due = dict(model.materialize().named_parameters())
    assert mine.keys() == due.keys()
    assert [n for n in due if not torch.equal(mine[n], due[n].detach())] == []


def test_initial_weights_are_bitwise_equal_in_any_layout(ray_cluster):
    model = MultimodalModule(
        {
            "vision": ModalityModule(
                FactorySource("tests.support.parity_models:make_cnn", {"width": 10}, seed=4), "mlp",
                hidden_size=10, example_inputs=pm.images(1),
            ),
            "audio": ModalityModule(pm.whisper(), "mlp", model_class=pm.WhisperEncoder, seed=5),
        },
        ModalityModule(pm.llama(tied=True), seed=6),
    )
    step = [pm.batch([7, 5], 3, vision=[0, 1, 1], audio=[1]), pm.batch([6], 4)]
    spec = MultimodalParallelSpec({"vision": CUT, "audio": CUT}, CUT, 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert model.language_model.module is None  # the start needed no weights here
        assert_same_bits(parallel, model)
        check_gradients(parallel, oracle_of(model), step)


def test_checkpoint_folders_are_read_by_the_ranks_only(ray_cluster, tmp_path):
    """Keep no weights on the driver; frozen and trainable modules; a factory's weights."""
    vision, llm = pm.build(pm.siglip(), 1), pm.build(pm.gpt2(), 2)
    cnn = pm.make_cnn()
    vision.save_pretrained(tmp_path / "vision")
    llm.save_pretrained(tmp_path / "llm")
    save_file(cnn.state_dict(), tmp_path / "cnn.safetensors")
    model = MultimodalModule(
        {
            "vision": ModalityModule(tmp_path / "vision", "mlp", frozen=True),
            "cnn": ModalityModule(
                FactorySource(
                    "tests.support.parity_models:make_cnn",
                    weights=str(tmp_path / "cnn.safetensors")
                ),
                "mlp", hidden_size=12,
            ),
        },
        ModalityModule(str(tmp_path / "llm")),
    )
    assert {n.split(".")[1] for n, _ in model.named_parameters()} == {"projector"}
    spec = MultimodalParallelSpec({"vision": CUT, "cnn": ParallelSpec(ranks=(1,))}, CUT, 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert {n.split(".")[1] for n, _ in model.named_parameters()} == {"projector"}
        mine = parallel.parameters(trainable_only=False)
        saved = {
            "vision_encoder": vision, "cnn_encoder": cnn, "language_model": llm,
        }
        for owner, module in saved.items():
            for name, parameter in module.named_parameters():
                assert torch.equal(mine[f"{owner}.module.{name}"], parameter), name
        step = [pm.batch([7, 5], 3, vision=[0, 1, 1], cnn=[0]), pm.batch([6], 4)]
        check_gradients(parallel, oracle_of(model), step)


def test_bf16_is_close_and_schedules_set_the_rate(ray_cluster):
    """Use bf16 autocast with fp32 parameters; a cosine schedule with warm-up, rate by rate."""
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(), 2)),
    )
    oracle = oracle_of(model)
    config = OptimizerConfig(
        lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1
    )
    one = ParallelSpec(pp=2, ranks=(0, 1))
    step = [pm.batch([7, 5], 3, vision=[0, 1]), pm.batch([16], 4)]
    spec = MultimodalParallelSpec({"vision": one}, one, 2)
    with spec.apply(model, optimizer=config, precision="bf16") as parallel:
        loss = oracle.loss(step)
        loss.backward()
        output = parallel.execute(step)
        assert close(output.loss, loss.item(), 2e-2)
        assert output.loss != loss.item()  # it did run in lower precision
        mine, due = parallel.gradients(), oracle.gradients()
        flat = torch.cat([mine[n].flatten() for n in due if due[n] is not None])
        wanted = torch.cat([g.flatten() for g in due.values() if g is not None])
        assert flat.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(flat, wanted, dim=0) > 0.995
        assert abs(flat.norm() / wanted.norm() - 1) < 0.05
        parallel.optimizer.zero_grad()
        outputs = [parallel.train_step(step) for _ in range(7)]
        rates = [0.0, 5e-3, 1e-2, 8.681981e-3, 5.5e-3, 2.318019e-3, 1e-3]
        assert [o.learning_rate for o in outputs] == pytest.approx(rates, rel=1e-6)
        assert outputs[-1].loss < outputs[0].loss


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
