"""Parts of VLMs for ``model.train``: each parameter is in exactly one part.

The projector is between the towers' blocks and the language model.
"""

import pytest
import torch
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import ModelError
from raymm.model.vlm import FROZEN, FULL, LANGUAGE, PROJECTOR, PretrainedVlm, from_pretrained
from raymm.training.phases import Phases, check_trains

PROJECTORS = {
    # Next to the encoder, within it, within it and fed from several blocks, after the call.
    "Idefics3ForConditionalGeneration": ["model.connector."],
    "Qwen2_5_VLForConditionalGeneration": ["model.visual.merger."],
    "Qwen3VLForConditionalGeneration": [
        "model.visual.merger.", "model.visual.deepstack_merger_list.",
    ],
    "Qwen2AudioForConditionalGeneration": ["model.multi_modal_projector."],
    "MllamaForConditionalGeneration": ["model.multi_modal_projector."],
    "Blip2ForConditionalGeneration": ["qformer.", "query_tokens", "language_projection."],
    "Kosmos2_5ForConditionalGeneration": ["image_to_text_projection."],
    # Within an encoder whose features it reads; larger than its encoder; after two encoders.
    "Dots3NoteForConditionalGeneration": ["model.vision_tower.merger.", "model.vision_tower.norm."],
    "Ernie4_5_VLMoeForConditionalGeneration": ["model.resampler_model."],
    "DeepseekVLHybridForConditionalGeneration": [
        "model.aligner.", "model.high_res_vision_alpha", "model.high_res_vision_neck.",
        "model.high_res_vision_proj.",
    ],
}


def made(name: str, train=None) -> PretrainedVlm:
    model_class = getattr(transformers, name)
    config, microbatches = runnable(Family("whole model", model_class, model_class.config_class))
    config.architectures = [name]
    model = from_pretrained(config, microbatches[0], train, seed=1)
    vars(model)["microbatches"] = microbatches
    return model


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", PROJECTORS)
def test_parts_have_every_parameter_once(name):
    model = made(name)
    parts = {part: {n for _, n in model.parameters_of(part)} for part in model.part_names}
    named = [n for own in parts.values() for n in own]
    assert sorted(named) == sorted(n for n, _ in model.source.skeleton().named_parameters())
    assert parts[PROJECTOR]
    assert {n for n in named if n.startswith(tuple(PROJECTORS[name]))} == parts[PROJECTOR]


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", [*[*PROJECTORS][:5], *[*PROJECTORS][-3:]])
def test_a_trained_projector_is_the_only_change(name):
    train = dict.fromkeys(made(name).part_names, FROZEN) | {PROJECTOR: FULL}
    model = made(name, train)
    check_trains(model)
    counts = model.parameter_counts()
    assert {part for part, (trained, _) in counts.items() if trained} == {PROJECTOR}
    assert counts[PROJECTOR][0] == counts[PROJECTOR][1] > 0
    whole = model.materialize()
    model.loss(vars(model)["microbatches"][:1]).backward()
    moved = {n for n, p in whole.named_parameters() if p.grad is not None}
    assert moved and moved <= {n for _, n in model.parameters_of(PROJECTOR)}
    frozen = whole.get_submodule(model.towers[0].root)
    assert not frozen.training  # no dropout in frozen parts


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", [*PROJECTORS][1:4])
@pytest.mark.parametrize("part", [PROJECTOR, LANGUAGE])
def test_adapters_are_in_their_configured_part(name, part):
    train = dict.fromkeys(made(name).part_names, FROZEN) | {part: LoraConfig(r=2)}
    model = made(name, train)
    own = {n for _, n in model.parameters_of(part)}
    trained = frozenset().union(*model.trained.values())
    assert trained and trained <= own and all("lora" in n for n in trained)
    assert all(n in trained for n in own if "lora" in n)


def test_models_without_trained_parts_are_refused():
    name = "Qwen2_5_VLForConditionalGeneration"
    everything = dict.fromkeys(made(name).part_names, FROZEN)
    with pytest.raises(ModelError, match="nothing is trained: vision, projector, language_model"):
        Phases(made(name, everything), {}, 4)
    model = made(name, {**everything, LANGUAGE: FULL})
    with pytest.raises(ModelError, match="after step 2 of run.at nothing is trained"):
        Phases(model, {2: {LANGUAGE: FROZEN}}, 4)
    Phases(model, {2: {LANGUAGE: FROZEN, PROJECTOR: FULL}}, 4)
    assert model.parameter_counts()[LANGUAGE][0] > 0 == model.parameter_counts()[PROJECTOR][0]


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", ["FuyuForCausalLM", "IdeficsForVisionText2Text"])
def test_a_model_without_projector_has_no_such_part(name):
    """Ignore the norm behind the blocks of Idefics' encoder, whose output is not read."""
    with pytest.raises(ModelError, match="train has 'projector'.* of vision, language_model"):
        made(name, {PROJECTOR: FULL})
    assert torch.is_tensor(next(made(name).materialize().parameters()))


@pytest.mark.parametrize("part", [PROJECTOR, LANGUAGE, "vision"])
def test_adapters_without_layers_name_the_part_and_its_layers(part):
    train = {part: LoraConfig(r=2, targets=("no_such_layer",))}
    with pytest.raises(ModelError) as error:
        made("Qwen3VLForConditionalGeneration", train)
    says = f"which matches no layer of part {part!r} of Qwen3VLForConditionalGeneration"
    assert says in str(error.value)
    of_projector = "visual.merger" in str(error.value).split("accepted")[1]
    assert of_projector == (part == PROJECTOR)
