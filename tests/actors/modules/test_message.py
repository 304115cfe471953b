"""Messages between stages and the context of a microbatch."""

import pytest
import torch
from transformers.modeling_outputs import BackboneOutput, BaseModelOutput

from raymm.actors.modules.message import Message, MicrobatchContext, first_tensor
from raymm.scheduler.graph.sample_ranges import Range

FEATURES = torch.ones(2, 3)


@pytest.mark.parametrize("output", [
    FEATURES, BaseModelOutput(last_hidden_state=FEATURES), (FEATURES, None), [FEATURES],
    BackboneOutput(feature_maps=(FEATURES,)),
], ids=["tensor", "model", "tuple", "list", "backbone"])  # fmt: skip
def test_features_of_an_output(output):
    assert first_tensor(output) is FEATURES


@pytest.mark.parametrize(("output", "message"), [
    (BackboneOutput(feature_maps=(FEATURES, FEATURES)), "BackboneOutput, with 2 feature maps"),
    ({"x": FEATURES}, "type dict"), ((None, FEATURES), "type tuple"),
])
def test_an_output_without_features_is_an_error(output, message):
    with pytest.raises(TypeError, match=message):
        first_tensor(output)


def test_samples_of_a_stage_name_rows_and_ids():
    context = MicrobatchContext(
        1, sample_ids=("a", "b", "c", "d"), samples=(Range(1, 2), Range(2, 3)),
        offsets={"vision": [0, 2, 2, 5, 6]},
    )
    assert context.own_ids == ("b", "c")
    assert context.own_rows("vision") == Range(2, 5)
    assert context.own_rows("llm") == Range(1, 3)
    assert MicrobatchContext(1, sample_ids=("a", "b")).own_ids == ("a", "b")


def test_a_backward_starts_at_tensors_and_loss():
    loss = torch.zeros(())
    assert Message((FEATURES,), {}).outputs == (FEATURES,)
    assert Message((FEATURES,), {}, loss=loss).outputs == (FEATURES, loss)
