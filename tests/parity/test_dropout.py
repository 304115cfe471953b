"""Dropout and other random numbers equal those of one process under every layout."""

import pytest
import torch
import transformers as hf

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_oracle import gradient_errors, label_tokens

SEED = 5
FULLY = {"dp": 2, "sharding": "fsdp"}
LAYOUTS = {
    "tp": {"tp": 2}, "cp": {"cp": 2}, "fsdp": FULLY, "dp": {"dp": 2},
    "pp": {"pp": 2, "recompute_layers": "all"}, "tp-again": {"tp": 2, "recompute_layers": "all"},
    "cp-again": {"cp": 2, "recompute_layers": "matmuls"},
    "fsdp-again": FULLY | {"recompute_layers": "all"},
}


def llama(**options):
    """Return a model with dropout of attention, and of column- and row-parallel adapters."""
    config = pm.llama(layers=2)
    config.attention_dropout = options.pop("attention", 0.2)
    return ModalityModule(pm.build(config, 3), lora=LoraConfig(r=4, dropout=0.3), **options)


def opt(attention=0.2):
    """Return a model with dropout of embeddings, attention, activations and residuals."""
    config = pm.opt()
    config.num_hidden_layers, config.dropout, config.attention_dropout = 2, 0.2, attention
    return ModalityModule(pm.build(config, 3))


def gpt2(attention=0.2):
    """Return a model with fused projections and embedding dropout per token."""
    config = pm.gpt2()
    config.resid_pdrop = config.embd_pdrop = 0.2
    config.attn_pdrop = attention
    return ModalityModule(pm.build(config, 3))


def mixtral(attention=0.0):
    """Return a model with noise in the routers' inputs."""
    config = hf.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, num_local_experts=4, router_jitter_noise=0.3,
        attention_dropout=attention,
    )
    return ModalityModule(pm.build(config, 3))


def dinov2():
    """Return a model with dropout of attention and hidden states, and drop path per item."""
    config = pm.dinov2()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = config.drop_path_rate = 0.2
    return ModalityModule(pm.build(config, 2), "mlp", frozen=False)


LANGUAGE = {"llama": llama, "opt": opt, "gpt2": gpt2, "mixtral": mixtral}


def expected(model, step):
    """Return loss and gradients of one process."""
    model.materialize().zero_grad()
    model.train()
    total = 0.0
    for number, one in enumerate(step):
        with model.drawing(SEED, 0, number):
            loss = model(**one, label_tokens=label_tokens(step))
        loss.backward()
        total += loss.item()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, found


def check(model, step, layout, encoders=None):
    model.materialize()
    for number, parameter in enumerate(p for n, p in model.named_parameters() if is_adapter(n)):
        torch.manual_seed(number)
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    loss, gradients = expected(model, step)
    spec = MultimodalParallelSpec(encoders or {}, ParallelSpec(**layout), 2)
    with spec.apply(model, seed=SEED) as parallel:
        output = parallel.execute(step)
        assert abs(output.loss - loss) <= 1e-5 * abs(loss)
        found = {n: g for n, g in parallel.gradients().items() if g is not None}
        assert gradient_errors(found, gradients) == []


CASES = [("llama", "tp"), ("llama", "fsdp-again"), ("opt", "cp"), ("gpt2", "cp-again"),
         ("llama", "pp"), ("mixtral", "fsdp"), ("llama", "cp"), ("opt", "tp-again"),
         ("opt", "fsdp"), ("gpt2", "tp"), ("mixtral", "cp"), ("opt", "dp")]  # fmt: skip


@pytest.mark.cells(7)
@pytest.mark.parametrize(("language", "layout"), CASES)
def test_language_models(ray_cluster, language, layout):
    step = [pm.batch([9, 7], 4), pm.batch([8, 5, 3], 5)]
    attention = {} if layout[:2] != "cp" else {"attention": 0.0}
    model = MultimodalModule({}, LANGUAGE[language](**attention))
    check(model, step, LAYOUTS[layout])


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", ["cp", "fsdp"])
def test_packed_rows(ray_cluster, layout):
    step = [pm.batch([9, 7], 4), pm.batch([8, 5, 3], 5)]
    model = MultimodalModule({}, llama(attention=0.0), packing=True)
    check(model, step, LAYOUTS[layout])


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", ["tp", "fsdp-again"])
def test_encoders(ray_cluster, layout):
    step = [pm.batch([9, 7, 4], 4, vision=[0, 1, 2]), pm.batch([8, 5], 5, vision=[0, 1])]
    model = MultimodalModule({"vision": dinov2()}, ModalityModule(pm.build(pm.llama(layers=2), 3)))
    check(model, step, {}, {"vision": ParallelSpec(**LAYOUTS[layout])})
