"""VLMs whose class computes a loss other than next-token cross entropy are rejected.

The message has the class and both numbers, and comes before anything starts.
"""

import re

import pytest
import torch
import torch.nn.functional as F
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError
from raymm.model.vlm import PretrainedVlm


def inputs_of(model_class):
    config, batches = runnable(Family("whole model", model_class, model_class.config_class))
    return config, {name: value for name, value in batches[0].items() if name != "labels"}


@pytest.fixture(scope="module")
def llava():
    return inputs_of(transformers.LlavaForConditionalGeneration)


def smoothed(logits, labels):
    rows, due = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(rows, due, label_smoothing=0.1)


def with_z_loss(logits, labels):
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return plain + 1e-4 * logits.logsumexp(-1).square().mean()


def not_shifted(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def capped(logits, labels):
    logits = 2 * torch.tanh(logits / 2)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def training_only(logits, labels, training=True):
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return plain + 0.1 * training


@pytest.mark.parametrize("loss", [smoothed, with_z_loss, not_shifted, capped, training_only])
def test_another_loss_is_refused_by_class_and_numbers(llava, loss):
    class OwnLoss(transformers.LlavaForConditionalGeneration):
        def forward(self, input_ids=None, labels=None, **more):
            output = super().forward(input_ids, **more)
            if labels is not None:
                own = {"training": self.training} if loss is training_only else {}
                output.loss = loss(output.logits, labels, **own)
            return output

    config, inputs = llava
    with pytest.raises(ProbeError, match="The loss of OwnLoss is not the next-token") as error:
        mixture_of(ConfigSource(OwnLoss, config, seed=1), inputs)
    own, due = map(float, re.findall(r" is (\d+\.\d+)", str(error.value)))
    assert abs(own - due) > 1e-5 * due


def test_cross_entropy_and_missing_losses_are_accepted(llava):
    class WithoutLoss(transformers.LlavaForConditionalGeneration):
        def forward(self, input_ids=None, pixel_values=None, attention_mask=None, use_cache=None):
            return super().forward(input_ids, pixel_values, attention_mask=attention_mask)

    config, inputs = llava
    for model_class in (transformers.LlavaForConditionalGeneration, WithoutLoss):
        assert mixture_of(ConfigSource(model_class, config, seed=1), inputs) is None


def test_a_forward_that_fails_with_labels_is_refused(llava):
    class FailsWithLabels(transformers.LlavaForConditionalGeneration):
        def forward(self, input_ids=None, labels=None, **more):
            if labels is not None:
                raise KeyError("weights")
            return super().forward(input_ids, **more)

    config, inputs = llava
    says = "FailsWithLabels takes labels, but fails with labels .*weights"
    with pytest.raises(ProbeError, match=says):
        mixture_of(ConfigSource(FailsWithLabels, config, seed=1), inputs)


def test_another_router_loss_names_the_accepted_ones():
    """Check the message: VLMs have no ``router_loss``, so only their config can disable the loss.
    """
    config, inputs = inputs_of(transformers.Qwen3VLMoeForConditionalGeneration)
    config.text_config.output_router_logits = True

    class Another(transformers.Qwen3VLMoeForConditionalGeneration):
        def forward(self, *args, labels=None, **more):
            output = super().forward(*args, labels=labels, **more)
            if labels is not None:
                output.loss = output.loss + output.logits.square().mean()
            return output

    with pytest.raises(ProbeError, match="switch it off in the model's config") as error:
        mixture_of(ConfigSource(Another, config, seed=1), inputs)
    assert "output_router_logits: false" in str(error.value)
    assert "router_loss" not in str(error.value)


def test_an_input_that_only_the_own_loss_reads_is_named():
    model_class = transformers.GraniteDoclingForConditionalGeneration
    config, inputs = inputs_of(model_class)
    config.density_router_hidden_size = 16
    source = ConfigSource(model_class, config, seed=1)
    assert PretrainedVlm(source, inputs).mixture is None
    rows = len(inputs["input_ids"])
    model = PretrainedVlm(source, {**inputs, "router_labels": torch.arange(float(rows)) % 2})
    with pytest.raises(ProbeError, match="Only its own loss reads 'router_labels'; leave it out"):
        _ = model.graph
