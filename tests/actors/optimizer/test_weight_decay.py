"""Parameters with weight decay are those of ``transformers.Trainer``."""

import peft
import pytest
import torch
import transformers
from torch import nn

from raymm.actors.adapters.lora import adapt
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.targets import find_targets
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.optimizer.updates import ParameterUpdates, layer_norm_parameters
from raymm.scheduler.plan.stage import StageId
from tests.support.trainer_groups import decayed_names

CLASSES = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM",
    "GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM", "PhiForCausalLM",
    "MixtralForCausalLM", "MambaForCausalLM", "BertModel", "T5EncoderModel", "SiglipVisionModel",
    "CLIPVisionModel", "Dinov2Model", "WhisperForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration", "PaliGemmaForConditionalGeneration",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "depth")


def skeleton(name: str) -> nn.Module:
    """Return a class of transformers with two blocks per module, on the meta device."""
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    for section in (config, *vars(config).values()):
        if isinstance(section, transformers.PretrainedConfig):
            for field in _LAYERS:
                if isinstance(getattr(section, field, None), int):
                    setattr(section, field, 2)
            if vars(section).get("layer_types"):
                section.layer_types = section.layer_types[:2]
    with torch.device("meta"):
        return model_class._from_config(config)


def decayed(module: nn.Module, config: OptimizerConfig) -> set[str]:
    layer_norms = layer_norm_parameters([module])
    return {
        name for name, parameter in module.named_parameters()
        if config.decay(name, id(parameter) in layer_norms)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_decayed_parameters_are_those_of_a_trainer(name):
    module = skeleton(name)
    names = {name for name, _ in module.named_parameters()}
    due = decayed_names(module) & names
    assert decayed(module, OptimizerConfig()) == due
    assert due != names  # each of the classes has norms or biases
    assert decayed(module, OptimizerConfig(no_decay=())) == names


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_decay_as_in_a_trainer(dora):
    name = "GPT2LMHeadModel"
    mine = skeleton(name)
    adapt(mine, find_targets(mine, LoraConfig()), LoraConfig(r=2, dora=dora), 1)
    config = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=dora, fan_in_fan_out=True)
    theirs = peft.get_peft_model(skeleton(name), config)
    due = {
        name.removeprefix("base_model.model.").replace(".default.weight", "").replace(
            ".default", ""
        )
        for name in decayed_names(theirs)
        if "lora_" in name
    }
    trained = {name for name, p in mine.named_parameters() if p.requires_grad}
    assert decayed(mine, OptimizerConfig()) & trained == due == trained


def updated(config: OptimizerConfig) -> dict[str, bool]:
    """Return, for each parameter, True if a step without gradients decays it."""
    llm = nn.ModuleDict({"module": nn.ModuleDict({
        "embed": nn.Embedding(4, 8), "ln_f": nn.LayerNorm(8), "proj": nn.Linear(8, 8),
    })})  # fmt: skip
    vision = nn.ModuleDict({"module": nn.Linear(4, 8), "projector": nn.LayerNorm(8)})
    stages = {StageId("llm", 0): llm, StageId("vision", 0): vision}
    parameters = {
        (stage, name): parameter for stage, module in stages.items()
        for name, parameter in module.named_parameters()
    }
    updates = ParameterUpdates(
        parameters, config, (), layer_norm_parameters(stages.values())
    )
    before = {key: parameter.detach().fill_(1.0).clone() for key, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    updates.step(parameters.values(), torch.zeros(()), 0)
    return {
        f"{stage.module}.{name}": not parameter.equal(before[stage, name])
        for (stage, name), parameter in parameters.items()
    }


@pytest.mark.parametrize(("config", "due"), [
    ({}, {"llm.module.embed.weight", "llm.module.proj.weight", "vision.module.weight"}),
    ({"modules": {"llm": {"no_decay": ["embed*"]}}},
     {"llm.module.proj.weight", "llm.module.proj.bias", "llm.module.ln_f.weight",
      "llm.module.ln_f.bias", "vision.module.weight"}),
    ({"no_decay": ("*",), "modules": {"vision_projector": {"no_decay": None}}}, set()),
    ({"no_decay": ("*",), "modules": {"vision_projector": {"no_decay": []}}},
     {"vision.projector.weight", "vision.projector.bias"}),
])  # fmt: skip
def test_modules_exempt_parameters_by_their_rules(config, due):
    moved = updated(OptimizerConfig(weight_decay=0.1, **config))
    assert {name for name, decays in moved.items() if decays} == due
    everything = updated(OptimizerConfig(weight_decay=0.1, no_decay=()))
    assert all(everything.values())
