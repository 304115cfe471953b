"""A multimodal model as a graph; mappings that cannot run it."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from raymm.errors import ModelError, PlanError
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from tests.support.multiplex_models import V, mapping_of

WIDTH = 16
LLAMA = hf.LlamaConfig(
    hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    vocab_size=V,
)  # fmt: skip


class Norms(nn.Module):
    """Encoder with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))[:, None]


def model(encoder=None, projector=None, frozen=None, llm=None) -> MultimodalModule:
    encoder = nn.Linear(5, WIDTH) if encoder is None else encoder
    return MultimodalModule(
        {"vision": ModalityModule(encoder, projector, hidden_size=WIDTH, frozen=frozen)},
        ModalityModule(LLAMA if llm is None else llm),
    )


def test_every_encoder_feeds_the_language_model():
    one = model(frozen=True)
    graph = module_graph(one)
    assert graph.topological == ("vision", "llm") and graph.edges == (("vision", "llm"),)
    assert graph.losses == {"llm"}
    assert graph.backward == {"llm"}


@pytest.mark.parametrize(("stages", "text"), [
    (({"vision": ((0,), 5)}, {"tower": ((0,), 5)}),
     r"stages\[1\].placements\[0\].module is 'tower'; accepted: llm, vision"),
    (({"llm": ((0,), 5)},), r"stages do not have module 'vision'"),
    (({"vision": ((0,), 5)}, {"llm": ((0,), 5)}, {"llm": ((1,), 5)}), "already complete"),
])  # fmt: skip
def test_mappings_of_another_model_or_order_are_refused(stages, text):
    with pytest.raises(PlanError, match=text):
        plan_of_mapping(model(), mapping_of(2, *stages))


def test_parameters_that_modules_share_are_refused_by_name():
    shared = nn.Linear(WIDTH, WIDTH)
    language = hf.LlamaForCausalLM(LLAMA)
    language.model.layers[0].self_attn.q_proj.weight = shared.weight
    mapping = mapping_of(1, {"vision": ((0,), 5)}, {"llm": ((0,), 10)})
    with pytest.raises(ModelError, match=r"q_proj.weight' of module 'llm' is 'weight' of module "
                                         "'vision projector'"):
        plan_of_mapping(model(projector=shared, llm=language), mapping)


def test_a_tied_head_is_the_language_models_own():
    tied = hf.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
    mapping = mapping_of(1, {"vision": ((0,), 5)}, {"llm": ((0,), 10)})
    plan_of_mapping(model(llm=hf.LlamaForCausalLM(tied)), mapping)


def test_norms_over_all_samples_stay_on_one_gpu():
    both = mapping_of(2, {"vision": ((0, 1), 5)}, {"llm": ((0, 1), 10)})
    alone = mapping_of(2, {"vision": ((1,), 5)}, {"llm": ((0, 1), 10)})
    trained, frozen = model(Norms()), model(Norms(), frozen=True)
    with pytest.raises(PlanError, match="'vision' has replicas.*freeze it.*batch norms"):
        stage_builders(trained, plan_of_mapping(trained, both))
    stage_builders(frozen, plan_of_mapping(frozen, both))
    stage_builders(trained, plan_of_mapping(trained, alone))
