"""The probe of a chain with callbacks: their inputs are sent, or the cut is rejected by name."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.modules.projector import Projector, ProjectorConfig
from raymm.actors.probe.callbacks import Cuts, check_chain, probe_chain
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.stage_inputs import from_side, to_side
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import ProbeError
from tests.support.masked_encoder import Masked

BOTH = Cuts(blocks=True, projector=True)
CONFIG = hf.SiglipVisionConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=16,
    patch_size=8, output_hidden_states=True,
)


def siglip(**callbacks) -> EncoderSpec:
    projector = LiveSource.of(Projector(ProjectorConfig("linear", 16, 8)))
    source = ConfigSource(hf.SiglipVisionModel, CONFIG)
    return EncoderSpec("vision", source, 4, projector, **callbacks)


def images(count: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}


def scaled_by_brightness(inputs, output):
    return output.last_hidden_state * inputs["pixel_values"].mean()


def shifted_by_brightness(inputs, output):
    return output + inputs["pixel_values"].mean()


def as_many_items(inputs, output):
    return output.last_hidden_state[: inputs["pixel_values"].shape[0]]


def run(spec, bounds, inputs):
    """Run the chain at its full depth, in stages."""
    message = None
    for lo, hi in zip(bounds, bounds[1:], strict=False):
        stage = EncoderStage.build(spec, lo, hi).eval()
        received = {} if message is None else {"vision": message}
        message = stage.run(None if lo else inputs, received, MicrobatchContext(1))
    return message.tensors[0]


@pytest.mark.cells(1)
@pytest.mark.parametrize("callbacks", [
    {"postprocess_module": scaled_by_brightness},
    {"postprocess_projector": shifted_by_brightness},
    {"postprocess_module": scaled_by_brightness, "postprocess_projector": shifted_by_brightness},
])  # fmt: skip
def test_inputs_of_callbacks_are_sent(callbacks):
    spec = probe_chain(siglip(**callbacks), BOTH)
    assert spec.travels == {"pixel_values"}
    expected = run(spec, (0, 5), images())
    for bounds in ((0, 2, 5), (0, 4, 5), (0, 1, 3, 4, 5)):
        assert torch.equal(run(spec, bounds, images()), expected)


def test_shapes_are_not_sent():
    spec = probe_chain(siglip(postprocess_module=as_many_items), BOTH)
    assert not spec.travels
    assert torch.equal(run(spec, (0, 2, 4, 5), images()), run(spec, (0, 5), images()))
    assert not probe_chain(siglip(), BOTH).travels


def test_unprobed_values_are_never_replaced_by_zero():
    """Use a callback that branches, and swallows errors."""
    def branching(inputs, output):
        if len(inputs["pixel_values"]) > 2:
            try:
                return output.last_hidden_state * inputs["pixel_values"].mean()
            except Exception:
                pass
        return output.last_hidden_state

    spec = probe_chain(siglip(postprocess_module=branching), BOTH)
    assert torch.equal(run(spec, (0, 2, 5), images()), run(spec, (0, 5), images()))
    with pytest.raises(ProbeError, match=r"postprocess_module of 'vision' reads inputs\['pixel_v"):
        run(spec, (0, 2, 5), images(3))


@pytest.mark.parametrize("index", [0, -2, 3])
def test_hidden_states_of_other_stages_are_refused(index):
    def layer(inputs, output):
        return output.hidden_states[index]

    with pytest.raises(ProbeError, match="output.hidden_states.*last_hidden_state.*one stage"):
        probe_chain(siglip(postprocess_module=layer), Cuts(True, False))
    assert not probe_chain(siglip(postprocess_module=layer), Cuts(False, True)).travels


def test_state_shared_by_callbacks_is_refused():
    kept = {}

    def keep(inputs):
        kept["mean"] = inputs["pixel_values"].mean()
        return inputs

    def use(inputs, output):
        return output.last_hidden_state * kept["mean"]

    with pytest.raises(ProbeError, match="callbacks of 'vision' fail where it is cut .KeyError"):
        probe_chain(siglip(preprocess=keep, postprocess_module=use), BOTH)
    with pytest.raises(ProbeError, match="'vision' gives other numbers where it is cut"):
        probe_chain(siglip(preprocess=_keep, postprocess_module=_use), BOTH)


_KEPT = {}


def _keep(inputs):
    _KEPT["mean"] = inputs["pixel_values"].mean()
    return inputs


def _use(inputs, output):
    """Read from a module that all copies of a callback share in one process."""
    return output.last_hidden_state * _KEPT["mean"]


def test_callbacks_that_do_not_take_the_example_are_named():
    def renamed(inputs):
        return {"pixel_values": inputs["image"]}

    with pytest.raises(ProbeError, match="preprocess_callback of 'vision' fails on pixel_values "
                       r"\(1, 3, 16, 16\) float32 .KeyError: 'image'.*give example_inputs"):
        probe_chain(siglip(preprocess=renamed), BOTH)
    spec = siglip(preprocess=renamed, postprocess_module=scaled_by_brightness)
    spec = probe_chain(spec, BOTH, {"image": images()["pixel_values"]})
    assert spec.travels == {"pixel_values"}


def test_inputs_of_later_blocks_are_sent():
    inputs = {"x": torch.randn(2, 3, 4), "mask": torch.rand(2, 3)}
    spec = EncoderSpec("vision", LiveSource.of(Masked()), 3)
    spec = probe_chain(spec, Cuts(True, False), inputs)
    assert spec.travels == {"mask"}
    assert torch.equal(run(spec, (0, 1, 3), inputs), run(spec, (0, 3), inputs))


def test_new_inputs_are_tried_first():
    x = torch.randn(2, 3, 4)
    cuts = Cuts(True, False)
    spec = probe_chain(EncoderSpec("vision", LiveSource.of(Masked()), 3), cuts, {"x": x})
    check_chain(spec, cuts, {"x": torch.randn(5, 3, 4)})
    with pytest.raises(ProbeError, match="Masked cannot be cut"):
        check_chain(spec, cuts, {"x": x, "mask": torch.rand(2, 3)})


def test_plain_values_of_a_preprocess_callback_are_sent():
    def with_factor(inputs):
        return {**inputs, "factor": 3.0}

    inputs = {"x": torch.randn(2, 3, 4)}
    spec = EncoderSpec("vision", LiveSource.of(Masked()), 3, preprocess=with_factor)
    spec = probe_chain(spec, Cuts(True, False), inputs)
    assert torch.equal(run(spec, (0, 1, 3), inputs), run(spec, (0, 3), inputs))

    def with_object(inputs):
        return {**inputs, "factor": 3.0, "mask": torch.rand, }

    spec = replace(spec, preprocess=with_object)
    with pytest.raises(ProbeError, match="Masked does not accept"):
        probe_chain(spec, Cuts(True, False), inputs)


def test_the_dtype_of_an_input_survives_without_its_values():
    side = to_side({"x": torch.zeros(2, 3, dtype=torch.float16), "n": [1, "a"]}, (), "vision")
    found = from_side(side, torch.device("cpu"))
    assert found["x"].dtype == torch.float16 and found["x"].shape == (2, 3)
    assert found["n"] == [1, "a"]
