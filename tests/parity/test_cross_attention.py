"""A language model whose layers attend to images equals one process, sample by sample.

Every stage with such a layer receives the images' tokens, and returns their gradient.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.models.mllama.modeling_mllama import (
    MllamaForCausalLM,
    _prepare_cross_attention_mask,
)

from raymm.actors.modules.merge import CrossAttend
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.sharding.visual_tokens import recomputes
from raymm.errors import ModelError, ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement, mapped_plan
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_reference, check_training
from tests.support.parity_oracle import Oracle

CROSS = [1, 3, 5, 7]


def mllama(layers: int = 8) -> MllamaForCausalLM:
    """Return a model in which every second layer attends to images; gates are open."""
    config = hf.models.mllama.MllamaTextConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=pm.V, cross_attention_layers=CROSS[: layers // 2],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(8)
    model = MllamaForCausalLM._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if "gate" in name:
                parameter.uniform_(0.2, 0.5)
    return model.train()


def model_of(merge: CrossAttend, frozen: bool = False) -> MultimodalModule:
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    return MultimodalModule({"vision": vision}, ModalityModule(mllama(), frozen=frozen), merge)


class CrossOracle(Oracle):
    """Oracle that runs sample by sample, as the model's own documentation describes."""

    token_id: int | None = None

    def loss_sum(self, microbatch):
        llm: Any = self.language_model.module
        total = torch.zeros(())
        part = microbatch.get("vision", {"sample_index": torch.empty(0)})
        for row in range(microbatch["input_ids"].shape[0]):
            real = microbatch["attention_mask"][row].bool()
            ids = microbatch["input_ids"][row][real]
            labels = microbatch["labels"][row][real].clone()
            labels[0] = -100
            features = [
                self._encode("vision", {"pixel_values": part["pixel_values"][i : i + 1]})
                for i in range(len(part["sample_index"])) if int(part["sample_index"][i]) == row
            ]
            arguments = {}
            if features:
                tokens = len(features[0])
                begun = torch.ones(len(ids), len(features))
                if self.token_id is not None:
                    places = (ids == self.token_id).cumsum(0)
                    begun = (places[:, None] > torch.arange(len(features))).float()
                mask, rows = _prepare_cross_attention_mask(
                    begun[None, :, None], tokens, cast(Any, begun.dtype)
                )
                arguments = {
                    "cross_attention_states": torch.cat(features)[None],
                    "cross_attention_mask": mask, "full_text_row_masked_out_mask": rows,
                }
            logits = llm(
                inputs_embeds=llm.get_input_embeddings()(ids)[None], use_cache=False, **arguments
            ).logits[0]
            total = total + F.cross_entropy(
                logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
            )
        return total


def oracle_of(model: MultimodalModule, token_id: int | None = None) -> CrossOracle:
    model.materialize()
    encoders: Any = {name: (one.module, one.projector) for name, one in model.encoders.items()}
    oracle = CrossOracle(encoders, cast(Any, model.language_model.module))
    oracle.token_id = token_id
    return oracle


def step(placeholders: bool = False) -> list[dict]:
    """Return two images in a row, none in another, and a microbatch without any."""
    image = (pm.IMAGE_TOKEN, 1)
    runs = [[image, image], [], [image]] if placeholders else None
    return [
        pm.batch([17, 12, 9], 4, runs, vision=[0, 0, 2]),
        pm.batch([13], 5),
        pm.batch([21, 11], 6, runs and [[image], [image]], vision=[0, 1]),
        pm.batch([20], 7, runs and [[image]], vision=[0]),
    ]


def test_layers_that_read_the_images():
    (port,) = module_graph(model_of(CrossAttend())).ports
    assert (port.name, port.layers) == ("cross_attention_states", tuple(CROSS))
    assert port.producers == ("vision",) and port.output is None


@pytest.mark.cells(1)
@pytest.mark.parametrize("placeholders", [False, True])
def test_four_stages_with_a_cross_layer_each(ray_cluster, placeholders):
    token = pm.IMAGE_TOKEN if placeholders else None
    model = model_of(CrossAttend(token))
    oracle, steps = oracle_of(model, token), step(placeholders)
    check_reference(model, oracle, steps)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=4), 4, "zero_bubble" if token else "1f1b")
    edges = spec.plan(model).edge_ports
    assert all(  # each stage receives them from the previous one
        ports.names == ("cross_attention_states",) and not ports.alone
        for (src, _), ports in edges.items() if src.module == "llm"
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, steps)
        check_training(parallel, oracle, [[steps], [steps[::-1]], [steps[1:], steps]])


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("llm", "schedule", "alone"),
    [
        # Within ranks: no messages.
        (ParallelSpec(pp=2, chunks=2, dp=2, layers=(1, 4, 2, 1)), "1f1b", {(0, 2), (1, 3)}),
        (ParallelSpec(pp=3, layers=(2, 1, 5)), "zero_bubble", {(0, 2)}),
    ],
)
def test_stages_without_a_cross_layer_are_skipped(ray_cluster, llm, schedule, alone):
    """Freeze the language model, which still sends gradients back."""
    model = model_of(CrossAttend(), frozen=True)
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({}, llm, 4, schedule, recompute=schedule == "1f1b")
    edges = spec.plan(model).edge_ports.items()
    assert {(src.index, dst.index) for (src, dst), ports in edges if ports.alone} == alone
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


def test_what_cannot_be_is_refused():
    merge = CrossAttend(pm.IMAGE_TOKEN)
    model = model_of(merge)
    with pytest.raises(ModelError, match="has 0 placeholder tokens"):
        model(**pm.batch([9], 4, vision=[0]))
    with pytest.raises(ModelError, match="packing is True"):
        MultimodalModule({}, ModalityModule(mllama(2)), merge, packing=True)
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    deaf = MultimodalModule({"vision": vision}, ModalityModule(pm.build(pm.llama())), CrossAttend())
    with pytest.raises(ProbeError, match="cross_attention_states"):
        module_graph(deaf)


def test_in_slots_on_quotas(ray_cluster):
    """Send the images' tokens to the ranks of the samples' rows."""
    model = model_of(CrossAttend())
    oracle, steps = oracle_of(model), step()
    mapping = Mapping(2, 10, (
        MultiplexStage((Placement("vision", (0, 1), 6),), 1.0),
        MultiplexStage((Placement("llm", (0, 1), 10),), 1.0),
    ))
    plan = mapped_plan(module_graph(model), mapping, 4)
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, steps)
        check_training(parallel, oracle, [[steps], [steps[::-1]], [steps[1:], steps]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("placeholders", [False, True])
def test_four_stages_of_two_processes(ray_cluster, placeholders):
    """Shard text and visual tokens; recompute keys and values of a row with many images."""
    token = pm.IMAGE_TOKEN if placeholders else None
    model = model_of(CrossAttend(token))
    oracle, steps = oracle_of(model, token), step(placeholders)
    if not placeholders:
        steps[3] = pm.batch([8], 7, vision=[0] * 24)
        config = cast(Any, model.language_model.module).config
        assert recomputes(config, 8, 24 * 4) and not recomputes(config, 17, 2 * 4)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=4, cp=2), 4)
    half = RankResources(cpus=0.5)
    with spec.apply(model, optimizer=OPTIMIZER, resources=half) as parallel:
        assert parallel.group.num_ranks == 9
        check_gradients(parallel, oracle, steps)
        check_training(parallel, oracle, [[steps], [steps[::-1]], [steps[1:], steps]])


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "sharding": "fsdp"}, {"dp": 2, "cp": 2, "sharding": "fsdp"},
        {"dp": 2, "cp": 2, "sharding": "zero1"}, {"tp": 2},
    ],
)
def test_other_degrees(ray_cluster, degrees):
    """Shard parameters, samples and tokens over processes."""
    model = model_of(CrossAttend())
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2, **degrees), 4)
    with spec.apply(model, optimizer=OPTIMIZER, resources=RankResources(cpus=0.5)) as parallel:
        check_gradients(parallel, oracle, step())
