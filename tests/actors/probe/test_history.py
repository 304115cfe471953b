"""Modules whose forwards depend on earlier ones are rejected; harmless caches are not."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.families import QUICK
from benchmarks.shared.family_check import runnable
from benchmarks.shared.family_classes import ENCODER, LANGUAGE, named
from raymm.actors.modules.blocks import num_blocks
from raymm.actors.probe import outputs
from raymm.actors.probe.experts import own_loss
from raymm.actors.probe.history import check_history
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.weights.source import ConfigSource
from raymm.batch.batches import TriedInputs
from raymm.errors import ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule

SMALL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
)


class Scaled(nn.Module):
    """Module that divides by the largest value of all forwards."""

    def __init__(self, persistent: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if persistent is None:
            self.largest = torch.zeros(())
        else:
            self.register_buffer("largest", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return self.linear(x) / self.largest


class Cached(nn.Module):
    """Module that caches a table of the longest input so far, and reads a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.calls = nn.Linear(4, 4), torch.zeros(0, 4), 0

    def forward(self, x):
        self.calls += 1
        if len(self.table) < len(x):
            self.table = torch.arange(len(x))[:, None] * torch.ones(4)
        return self.linear(x) + self.table[: len(x)]


def run(model, other):
    return model(3 * torch.ones(6, 4) if other else torch.ones(2, 4))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("persistent", [None, False], ids=["attribute", "buffer"])
def test_state_kept_by_a_forward_is_named(trains, persistent):
    with pytest.raises(ProbeError, match=r"'vision'.*Sequential.* which change 0\.largest\."):
        check_history("vision", nn.Sequential(Scaled(persistent)), trains, run)


def test_a_lost_attribute_of_evaluation_is_seen():
    class Counted(nn.Linear):
        seen = 0

        def forward(self, x):
            self.seen += not self.training
            return super().forward(x) * (1 + self.seen)

    with pytest.raises(ProbeError, match=r"0\.seen"):
        check_history("vision", nn.Sequential(Counted(4, 4)), True, run)


@pytest.mark.parametrize("made", [
    Cached, lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5), lambda: Scaled(persistent=True),
    lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
], ids=["cache", "batch norm", "dropout", "persistent", "spectral norm"])  # fmt: skip
def test_caches_and_checkpointed_state_are_accepted(made):
    model = nn.Sequential(made())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_history("vision", model, True, run)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model[0], "calls") or model[0].calls == 0


class Counting(hf.LlamaForCausalLM):
    """Model that scales logits by the longest text so far."""

    longest = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.longest = max(self.longest, output.logits.shape[1])
        output.logits = output.logits * self.longest
        return output


def test_stateful_modules_are_refused_before_actors_start():
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))
    encoder = ModalityModule(
        Scaled(), "mlp", hidden_size=4, example_inputs={"x": torch.ones(2, 3, 4)}
    )
    with pytest.raises(ProbeError, match=r"'vision'.*largest"):
        TriedInputs(MultimodalModule({"vision": encoder}, ModalityModule(llama)))
    counting = MultimodalModule({}, ModalityModule(Counting(llama.config)))
    with pytest.raises(ProbeError, match=r"'llm'.*Counting.*longest"):
        counting.check_loss()
    dynamic = hf.LlamaConfig(
        **SMALL, max_position_embeddings=4,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    )
    MultimodalModule({}, ModalityModule(hf.LlamaForCausalLM(dynamic))).check_loss()


@pytest.mark.parametrize("kind, name", [(k, n) for k in (LANGUAGE, ENCODER) for n in QUICK[k]])
def test_families_are_not_refused(kind, name, monkeypatch):
    passed = []

    def noted(*args):
        check_history(*args)
        passed.append(args[0])

    for module in (outputs, own_loss):
        monkeypatch.setattr(module, "check_history", noted)
    family = named(kind, name)
    config, inputs = runnable(family, True)
    source = ConfigSource(family.model_class, config)
    if kind == LANGUAGE:
        own_loss.check_language_loss(source, ignore=True)
    else:
        try:
            outputs.check_outputs(
                EncoderSpec("enc", source, num_blocks(source.skeleton())), inputs[0]
            )
        except ProbeError as error:
            assert "callback" in str(error)  # of another output
    assert passed
