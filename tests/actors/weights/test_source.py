"""Sources of weights: configs, factories, checkpoint folders; precision; schedules."""

import pytest
import torch
from safetensors.torch import save_file

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.weights.source import FactorySource
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, close, oracle_of

CUT = ParallelSpec(pp=2, ranks=(0, 1))


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
