"""A multimodal model as a graph for multiplexed programs; mappings that cannot run it."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from multiplex_models import V, mapping_of
from torch import nn

from raymm.model.mapping_check import check_mapping, multimodal_nodes
from raymm.model.modality_module import ModalityModule, ModelError
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range, rows_of
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.check_program import check_program
from raymm.scheduler.multiplex.instructions import Finish, Reduce, Run, Update
from raymm.scheduler.multiplex.lowering import lower

WIDTH = 16
LLAMA = hf.LlamaConfig(
    hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    vocab_size=V,
)  # fmt: skip


class Norms(nn.Module):
    """An encoder with a batch norm."""

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


def test_every_encoder_feeds_the_language_model_which_is_the_loss():
    one = model(frozen=True)
    graph = module_graph(one)
    assert graph.topological == ("vision", "llm") and graph.edges == (("vision", "llm"),)
    assert graph.losses == {"llm"}
    assert graph.backward == {"llm"}
    vision, llm = multimodal_nodes(one)
    assert (vision.name, llm.name) == ("vision", "llm") and llm.inputs[0].producer == "vision"
    names = {name for name, _ in vision.build().named_parameters()}
    assert names == {"module.weight", "module.bias"}  # as checkpoints have them


def test_iterations_before_the_last_keep_their_gradients():
    graph = module_graph(model())
    mapping = mapping_of(2, {"vision": ((0,), 5)}, {"llm": ((0, 1), 10)})
    program = lower(graph, mapping, 3, reduce=False)
    check_program(graph, program)
    kinds = {type(one) for listed in program.instructions for one in listed}
    assert not kinds & {Reduce, Finish, Update}
    backward = [one for listed in program.instructions for one in listed
                if isinstance(one, Run) and one.direction is Direction.BACKWARD]  # fmt: skip
    assert sum(part.samples.size for run in backward for part in run.parts) == 6


def test_rows_of_samples_with_any_number_of_items():
    offsets = (0, 2, 2, 3)  # two items, none, one
    assert rows_of(Range(0, 2), offsets) == (0, 2) and rows_of(Range(1, 3), offsets) == (2, 3)
    assert not rows_of(Range(1, 2), offsets)
    assert rows_of(Range(1, 2), None) == (1, 2)


@pytest.mark.parametrize(("stages", "text"), [
    (({"vision": ((0,), 5)}, {"tower": ((0,), 5)}),
     r"stages\[1\].placements\[0\].module is 'tower'; the model's modules are vision, llm"),
    (({"vision": ((0,), 5)},), r"stages do not have \['llm'\]"),
    (({"vision": ((0,), 5), "llm": ((1,), 5)},), "must be complete in an earlier stage"),
    (({"vision": ((0,), 5)}, {"llm": ((0,), 5)}, {"llm": ((1,), 5)}), "already complete"),
])  # fmt: skip
def test_mappings_of_another_model_or_order_are_refused(stages, text):
    with pytest.raises(MultiplexError, match=text):
        check_mapping(model(), mapping_of(2, *stages))


def test_parameters_that_modules_share_are_refused_by_name():
    shared = nn.Linear(WIDTH, WIDTH)
    language = hf.LlamaForCausalLM(LLAMA)
    language.model.layers[0].self_attn.q_proj.weight = shared.weight
    mapping = mapping_of(1, {"vision": ((0,), 5)}, {"llm": ((0,), 10)})
    with pytest.raises(ModelError, match=r"q_proj.weight' of module 'llm' is 'weight' of module "
                                         "'vision projector'"):
        check_mapping(model(projector=shared, llm=language), mapping)


def test_a_tied_head_is_the_language_models_own():
    tied = hf.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
    mapping = mapping_of(1, {"vision": ((0,), 5)}, {"llm": ((0,), 10)})
    check_mapping(model(llm=hf.LlamaForCausalLM(tied)), mapping)


def test_norms_over_all_samples_stay_on_one_gpu():
    both = mapping_of(2, {"vision": ((0, 1), 5)}, {"llm": ((0, 1), 10)})
    with pytest.raises(MultiplexError, match="'vision' on 2 GPUs.*batch norm.*one GPU, or freeze"):
        check_mapping(model(Norms()), both)
    check_mapping(model(Norms(), frozen=True), both)
    check_mapping(model(Norms()), mapping_of(2, {"vision": ((1,), 5)}, {"llm": ((0, 1), 10)}))
