"""Language models of parts whose class computes a loss other than next-token cross entropy."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from benchmarks.shared.family_check import runnable
from benchmarks.shared.family_classes import language_models
from benchmarks.shared.family_configs import UnmakeableError
from raymm.actors.probe.cut import probe_language_model
from raymm.actors.probe.experts.own_loss import check_language_loss, cross_entropy
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule

SIZES = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    num_key_value_heads=2, vocab_size=32,
)  # fmt: skip
# Plain, another loss, a router loss, no loss for logits of ids; then all others in a sweep.
QUICK = ("LlamaForCausalLM", "BartForCausalLM", "MixtralForCausalLM")
FAMILIES = sorted(language_models(), key=lambda family: (family.name not in QUICK, family.name))


def plain(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def smoothed(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )


def not_shifted(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def slightly_more(logits, labels):
    return plain(logits, labels) * (1 + 5e-5)


def fails(logits, labels):
    raise TypeError("weights are missing")


def model_with(loss, **options) -> MultimodalModule:
    class OwnLoss(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **more):
            output = super().forward(input_ids, **more)
            if labels is not None:
                output.loss = loss(output.logits, labels)
            return output

    module = OwnLoss(hf.LlamaConfig(**SIZES))
    return MultimodalModule({}, ModalityModule(module), **options)


@pytest.mark.parametrize(("loss", "says"), [
    (smoothed, "OwnLoss is not the next-token cross entropy"),
    (not_shifted, "compares the logits of each token with the label of the same token"),
    (slightly_more, "OwnLoss is not the next-token cross entropy"),
    (fails, "OwnLoss takes labels, but fails .*weights are missing"),
])  # fmt: skip
def test_another_loss_is_refused_unless_it_is_ignored(loss, says):
    with pytest.raises(ProbeError, match=says) as error:
        model_with(loss).check_loss()
    assert "MultimodalModule(..., router_loss='ignore')" in str(error.value)
    model_with(loss, router_loss="ignore").check_loss()


def test_the_next_token_cross_entropy_and_no_loss_are_accepted():
    model_with(plain).check_loss()
    model_with(lambda logits, labels: None).check_loss()

    class WithoutLabels(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, use_cache=None):
            return super().forward(
                input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
            )

    MultimodalModule({}, ModalityModule(WithoutLabels(hf.LlamaConfig(**SIZES)))).check_loss()


def test_classes_with_labels_shifted_by_the_caller_are_refused():
    bart = hf.BartConfig(
        d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=32,
    )  # fmt: skip
    source = ConfigSource(hf.BartForCausalLM, bart)
    with pytest.raises(ProbeError, match="The loss of BartForCausalLM .*label of the same token"):
        MultimodalModule({}, ModalityModule(source)).check_loss()


def losses_of(family):
    """Return the configuration, the loss that a class computes or None, and the cross entropy."""
    config, microbatches = runnable(family, training=True)
    torch.manual_seed(0)
    model = family.model_class._from_config(config).train()
    ids = microbatches[0]["input_ids"]
    with torch.no_grad():
        try:
            output = model(input_ids=ids, labels=ids, use_cache=False)
        except Exception:  # noqa: BLE001  the class rejects such labels
            return config, None, 0.0
    loss = getattr(output, "loss", None)
    if loss is None or output.logits.shape[:2] != ids.shape:
        return config, loss, float("nan")
    return config, float(loss), cross_entropy(output.logits, ids)


@pytest.mark.cells(len(QUICK) + 1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_another_loss_than_raymm_computes_is_refused(family):
    try:
        config, loss, due = losses_of(family)
    except UnmakeableError as error:
        pytest.skip(str(error))
    source = ConfigSource(family.model_class, config, seed=1)
    try:
        mixture = mixture_of(source)
        is_reproduced = mixture is not None and mixture.loss is not None
        check_language_loss(source, is_reproduced)
    except ProbeError:
        assert family.name not in ("LlamaForCausalLM", "MixtralForCausalLM")
        return
    if is_reproduced or loss is None or loss == pytest.approx(due, rel=1e-5):
        return
    with pytest.raises(ProbeError):  # a class without embeddings as input is not tried with labels
        probe_language_model(source)
