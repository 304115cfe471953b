"""Losses that causal language models of transformers compute, compared with raymm's."""

import pytest
import torch

from benchmarks._family_check import runnable
from benchmarks._family_classes import language_models
from benchmarks._family_configs import UnmakeableError
from raymm.actors.probe.cut import probe_language_model
from raymm.actors.probe.experts.own_loss import check_language_loss, cross_entropy
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError

# Plain, another loss, a router loss, no loss for logits of ids; then all others in a sweep.
QUICK = ("LlamaForCausalLM", "BartForCausalLM", "MixtralForCausalLM")
FAMILIES = sorted(language_models(), key=lambda family: (family.name not in QUICK, family.name))


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
