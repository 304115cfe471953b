"""Layers that mix tokens by other means than attention."""

from raymm.actors.probe.attention import find_mixers
from raymm.model.modality_module import ModalityModule
from tests.support import parity_models as pm


def test_pure_attention_has_no_mixers():
    model = ModalityModule(pm.build(pm.llama(), 3))
    assert find_mixers(model.source()) == frozenset()
