""":class:`raymm.ParallelModel` runs the result of ``raymm.plan_multiplexed``."""

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, LlamaConfig, SiglipVisionConfig

import raymm
from raymm.costs.scaling_estimates import shapes_of
from raymm.errors import PlanError
from raymm.model.contrastive import clip_dag
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.modality_module import ModalityModule
from raymm.model.module_dag import ModuleDag


def clip() -> CLIPModel:
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    text = dict(hidden_size=20, intermediate_size=28, num_hidden_layers=1, num_attention_heads=2,
                vocab_size=31, max_position_embeddings=9, eos_token_id=2, bos_token_id=0,
                pad_token_id=1)  # fmt: skip
    return CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=12))


def test_a_planned_mapping_gives_the_loss_of_one_process(ray_cluster):
    dag = clip_dag(clip())
    with pytest.raises(PlanError, match="tokens of 'text' are not given"):
        raymm.plan_multiplexed(dag, gpus=2, device="H100", batch=6)
    # The image's tokens, four patches and a class token, are in its config.
    planned = raymm.plan_multiplexed(dag, gpus=2, device="H100", batch=6, tokens={"text": 9})
    assert planned.problem.names == ("image", "text") and planned.problem.edges == ()
    torch.manual_seed(1)
    batch = {
        "pixel_values": torch.randn(6, 3, 8, 8), "input_ids": torch.randint(3, 31, (6, 9)),
        "attention_mask": torch.ones(6, 9, dtype=torch.long),
    }
    expected = dag(batch).loss.item()
    plan = raymm.plan_of_mapping(dag, planned.mapping)
    with raymm.ParallelModel(dag, plan, timeout_s=120) as running:
        assert running.execute(batch).loss == pytest.approx(expected, rel=1e-5)


class Answer(torch.nn.Module):
    """Decoder with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(24, 7)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(features).square().mean(dim=(1, 2))


def test_frozen_towers_with_projectors_and_decoders_with_losses():
    siglip = SiglipVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    llama = LlamaConfig(hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=2, vocab_size=31)  # fmt: skip
    dag = ModuleDag({
        "vision": DagModule(
            ModalityModule(siglip, torch.nn.Linear(16, 24), frozen=True), reads="pixel_values"
        ),
        "backbone": DagModule(
            llama, reads="attention_mask", inputs={"inputs_embeds": "vision"}, outputs="logits",
            model_class="LlamaForCausalLM",
        ),
        "answer": DagLoss(Answer(), inputs={"features": "vision"}),
        "other": DagLoss(Answer(), inputs={"features": "backbone"}),
    })
    shapes = {shape.name: shape for shape in shapes_of(dag)}
    assert list(shapes) == ["vision", "backbone", "answer", "other"]
    # Only the projector is trained; it is the first trained layer, so the tower has no B_d.
    assert shapes["vision"].trainable == (False, False, True)
    assert shapes["vision"].before == (False, False, False)
    assert shapes["backbone"].causal and shapes["backbone"].before == (True, True)
    planned = raymm.plan_multiplexed(
        dag, gpus=2, device="H100", batch=4,
        tokens={"vision": 4, "backbone": 4, "answer": 4, "other": 4},
    )
    assert set(planned.problem.edges) == {
        ("vision", "backbone"), ("vision", "answer"), ("backbone", "other")
    }
    stage_of = {
        p.module: s for s, stage in enumerate(planned.mapping.stages) for p in stage.placements
    }
    assert stage_of["vision"] < min(stage_of["backbone"], stage_of["answer"])
    assert stage_of["backbone"] < stage_of["other"]
