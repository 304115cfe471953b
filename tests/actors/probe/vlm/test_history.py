"""Modules of VLMs and of graphs whose forwards depend on earlier ones are rejected."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llava.modeling_llava import LlavaModel

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from raymm.actors.probe.vlm import history
from raymm.actors.probe.vlm.history import check_vlm_history
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError
from raymm.layout.stage_builders import stage_builders
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from raymm.model.vlm import FROZEN, PretrainedVlm
from raymm.runtime.specs import dag_plan

Llava = transformers.LlavaForConditionalGeneration


def whole(model_class, train=None, name: str | None = None) -> PretrainedVlm:
    of_inputs = model_class if name is None else getattr(transformers, name)
    config, batches = runnable(Family("whole model", of_inputs, of_inputs.config_class))
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    return PretrainedVlm(ConfigSource(model_class, config, seed=1), inputs, train)


def check(model: PretrainedVlm, name: str) -> None:
    if name == "llm":
        check_vlm_history(model.language_spec(), model.towers, model.example)
    else:
        inputs = model.tower(name).inputs(model.example)
        check_vlm_history(model.tower_spec(name), (), inputs)


class Longest(Llava):
    """Model that scales logits by the length of the longest text so far."""

    longest = 0

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        self.longest = max(self.longest, output.logits.shape[1])
        output.logits = output.logits * self.longest
        return output


class MostRows(Llava):
    """Model that scales logits by the largest number of rows so far, in training only."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("most", torch.zeros(()), persistent=False)

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training:
            self.most = self.most.clamp(min=len(output.logits))
            output.logits = output.logits * self.most
        return output


@pytest.mark.parametrize(("model_class", "state"), [(Longest, "longest"), (MostRows, "most")])
def test_a_language_model_that_keeps_state_is_named(model_class, state):
    model = whole(model_class, name="LlavaForConditionalGeneration")
    with pytest.raises(ProbeError, match=rf"'llm'.*{model_class.__name__}.*which change {state}\."):
        check(model, "llm")
    check(model, "vision")
    frozen = whole(model_class, {"language_model": FROZEN}, "LlavaForConditionalGeneration")
    if model_class is MostRows:
        check(frozen, "llm")


def test_a_tower_that_keeps_state_is_named(monkeypatch):
    features = LlavaModel.get_image_features

    def scaled(self, pixel_values, *args, **kwargs):
        largest = pixel_values.detach().abs().max()
        self.largest = torch.maximum(getattr(self, "largest", largest), largest)
        return features(self, pixel_values / self.largest, *args, **kwargs)

    monkeypatch.setattr(LlavaModel, "get_image_features", scaled)
    model = whole(Llava)
    with pytest.raises(ProbeError, match=r"'vision'.*which change model\.largest"):
        check(model, "vision")
    check(model, "llm")


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", [
    "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "MllamaForConditionalGeneration",
])  # fmt: skip
def test_whole_models_are_not_refused(name, monkeypatch):
    compared = []
    checked = history.check_history
    monkeypatch.setattr(
        history, "check_history", lambda *args: checked(*args) or compared.append(args[0])
    )
    model = whole(getattr(transformers, name))
    for module in model.module_names:
        check(model, module)
    assert set(compared) == set(model.module_names)


class Averaged(nn.Module):
    """Module that centres by a running mean that no checkpoint contains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Squared(nn.Module):
    def forward(self, x):
        return x.square().sum(1)


@pytest.mark.parametrize("given", [True, False])
def test_a_module_of_a_graph_that_keeps_state_is_named(given):
    def graph(module, **options):
        return ModuleDag({
            "first": DagModule(module, reads="x", **options),
            "loss": DagLoss(Squared(), inputs={"x": "first"}),
        })

    example = {"example_inputs": {"x": torch.ones(3, 4)}} if given else {}
    dag = graph(Averaged(), **example)
    if given:
        with pytest.raises(ProbeError, match=r"'first'.*Averaged.*which change mean\."):
            stage_builders(dag, dag_plan(dag))
    plain = graph(nn.Linear(4, 4))
    stage_builders(plain, dag_plan(plain))
