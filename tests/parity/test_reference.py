"""``MultimodalModule.forward``, the reference on one process, equals the oracle."""

import pytest
import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from tests.support import parity_models as pm
from tests.support.parity_check import check_reference, oracle_of
from tests.support.parity_oracle import prepend, replace

MIXED = dict(vision=[0, 0, 2], audio=[2])  # two images; text only; one of each


def build(vision, audio, llm, merge=None):
    encoders = {
        "vision": ModalityModule(
            vision, "mlp", hidden_size=None if hasattr(vision, "config") else 12
        ),
        "audio": ModalityModule(audio, "linear"),
    }
    return MultimodalModule(encoders, ModalityModule(llm), merge)


@pytest.mark.parametrize(
    "vision,llm",
    [("siglip", "llama"), ("clip", "gemma3"), ("dinov2", "gpt2"), ("cnn", "opt"),
     ("siglip", "qwen3")],
)
def test_forward_equals_the_oracle(vision, llm):
    vision = pm.make_cnn() if vision == "cnn" else pm.build(getattr(pm, vision)(), seed=1)
    model = build(vision, pm.build(pm.whisper(), seed=2), pm.build(getattr(pm, llm)(), seed=3))
    oracle = oracle_of(model)
    mixed = pm.batch([7, 5, 9], seed=4, **MIXED)
    text_only = pm.batch([4, 11], seed=5)
    check_reference(model, oracle, [mixed])
    check_reference(model, oracle, [mixed, text_only])


def test_forward_with_placeholders_equals_the_oracle():
    tokens = {"vision": pm.IMAGE_TOKEN, "audio": pm.AUDIO_TOKEN}
    model = build(
        pm.build(pm.siglip(), 1), pm.build(pm.whisper(), 2), pm.build(pm.llama(), 3),
        ReplaceTokens(tokens),
    )
    image, sound = (pm.IMAGE_TOKEN, 4), (pm.AUDIO_TOKEN, pm.AUDIO_FRAMES // 2)
    step = [
        pm.batch([7, 5, 9], 4, [[image, image], [], [sound, image]], **MIXED),
        pm.batch([6, 8], 5, [[image], []], vision=[0]),
    ]
    check_reference(model, oracle_of(model, replace(tokens)), step)


def test_loss_does_not_depend_on_the_microbatching():
    model = build(pm.build(pm.siglip(), 1), pm.build(pm.whisper(), 2), pm.build(pm.llama(), 3))
    oracle = oracle_of(model, prepend)
    whole = [pm.batch([7, 5, 9, 6], 4, vision=[0, 1, 1, 3], audio=[2])]
    from raymm.data.loading.in_memory import split_batch

    parts = split_batch(whole[0], 2)
    with torch.no_grad():
        assert abs(oracle.loss(whole) - oracle.loss(parts)) < 1e-6
