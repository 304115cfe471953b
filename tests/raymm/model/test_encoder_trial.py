"""Trials of encoders on the inputs of a batch."""

import pytest
import torch

from raymm.batch.check import PartsCheck
from raymm.errors import DataError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from tests.support import parity_models as pm


def test_encoders_are_tried_once_per_signature():
    """Check that another number of items needs no new trial, and another dtype does."""
    calls = []
    cnn = pm.make_cnn()
    cnn.stem.register_forward_pre_hook(lambda *_: calls.append(1))
    model = MultimodalModule(
        {"vision": ModalityModule(cnn, "linear", hidden_size=12)}, ModalityModule(pm.llama())
    )
    check = PartsCheck(model)
    for rows in ([0, 1], [0], [1, 1, 1]):
        check.microbatches([pm.batch([5, 5], 3, vision=rows)], 1)
    assert len(calls) == 1
    wrong = pm.batch([5, 5], 3, vision=[0, 1])
    wrong["vision"]["pixel_values"] = wrong["vision"]["pixel_values"].double()
    for _ in range(2):
        with pytest.raises(DataError, match=r"does not take pixel_values .* float64 .*double"):
            check.microbatches([wrong], 1)


class LooksAtValues(torch.nn.Module):
    """Encoder with a table of ids that cannot run on the meta device."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 8)

    def forward(self, codes):
        if int(codes.sum()) < 0:
            raise ValueError("codes are below 0")
        return self.table(codes)


def test_encoders_that_read_values_and_ids():
    model = MultimodalModule(
        {"sound": ModalityModule(LooksAtValues(), "linear", hidden_size=8)},
        ModalityModule(pm.llama()),
    )
    check = PartsCheck(model)
    batch = pm.batch([5, 5], 3)

    def codes(value):
        return [{**batch, "sound": {"codes": value}}]

    check.microbatches(codes(torch.full((2, 3), 9)), 1)
    with pytest.raises(DataError, match=r"'codes' of 'sound'\[1, 0\] is 10; accepted: 0 to 9"):
        check.microbatches(codes(torch.tensor([[1, 1, 1], [10, 1, 1]])), 1)
    with pytest.raises(DataError, match="does not take codes \(2, 3\) float32"):
        check.microbatches(codes(torch.ones(2, 3)), 1)
    with pytest.raises(DataError, match="codes are below 0"):
        check.microbatches(codes(torch.full((2, 4), -1)), 1)


def test_features_without_one_row_per_item_are_rejected():
    def pooled(inputs, output):
        return output.last_hidden_state.flatten(0, 1)[None]

    def wide(inputs, features):
        return torch.cat([features, features], -1)

    for callbacks, said in (
        ({"postprocess_module_callback": pooled}, r"features of shape \(1, 8, 32\) for 2 items"),
        ({"postprocess_projector_callback": wide}, r"features of shape \(2, 4, 64\)"),
    ):
        vision = ModalityModule(pm.build(pm.siglip()), "linear", **callbacks)
        check = PartsCheck(MultimodalModule({"vision": vision}, ModalityModule(pm.llama())))
        with pytest.raises(DataError, match=said):
            check.microbatches([pm.batch([5, 5], 3, vision=[0, 1])], 1)


def second_to_last_state(inputs, output):
    """Return a state of a deep encoder that the meta device cannot compute."""
    assert float(output.hidden_states[0].sum()) != 0
    return output.hidden_states[4]


def test_callbacks_that_cannot_be_tried_are_left_to_the_ranks():
    config = pm.siglip(layers=5)
    config.output_hidden_states = True
    vision = ModalityModule(
        pm.build(config), "linear", postprocess_module_callback=second_to_last_state
    )
    check = PartsCheck(MultimodalModule({"vision": vision}, ModalityModule(pm.llama())))
    check.microbatches([pm.batch([5, 5], 3, vision=[0, 1])], 1)
    wrong = pm.batch([5, 5], 3, vision=[0, 1])
    wrong["vision"]["pixel_values"] = torch.zeros(2, 3, 32, 32)
    with pytest.raises(DataError, match="does not take pixel_values"):
        check.microbatches([wrong], 1)
