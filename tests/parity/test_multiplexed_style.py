"""The multiplexed style equals the oracle, and the pipelined style."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.errors import DataError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement, mapped_plan
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of
from tests.support.parity_models import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    batch,
    build,
    llama,
    opt,
    siglip,
    whisper,
)
from tests.support.parity_oracle import replace

STEPS = 10
GPUS = 3

pytestmark = pytest.mark.usefixtures("ray_cluster")


def mapping_of(*stages):
    """Return a mapping from stages of modules with GPUs and quota."""
    return Mapping(GPUS, STEPS, tuple(
        MultiplexStage(tuple(Placement(m, *place) for m, place in one.items()), 1.0)
        for one in stages
    ))


# Concurrent encoders on one GPU, one of them also on another; the language model on all.
SIDE_BY_SIDE = mapping_of(
    {"vision": ((0, 1), 6), "audio": ((1,), 4)}, {"llm": ((0, 1), 10)}
)
# Images in one stage, audio in the next, on other numbers of GPUs; one has no text.
IN_TURN = mapping_of(
    {"vision": ((1, 2), 7)}, {"audio": ((0, 1), 10)}, {"llm": ((0, 1), 8)}
)


@contextmanager
def running_of(model, mapping, **options):
    """Start the model on separate processes."""
    plan = mapped_plan(module_graph(model), mapping, 3)
    options = {"optimizer": OPTIMIZER, "timeout_s": 120, **options}
    with ParallelModel(model, plan, **options) as running:
        yield running


def model_of(llm, frozen=None, merge=None, **options):
    """Return a model with vision and audio in front of a language model."""
    frozen = frozen or {}
    encoders = {
        "vision": ModalityModule(build(siglip(), 1), "mlp"),
        "audio": ModalityModule(build(whisper(), 2), "linear"),
    }
    model = MultimodalModule(encoders, ModalityModule(build(llm)), merge, **options)
    for name, (module, projector) in frozen.items():
        part = model.language_model if name == "llm" else encoders[name]
        part.freeze(module, projector)
    return model


def step(seed=0):
    """Return a step of three microbatches.

    One with two images, one, audio, both, and text alone; one with audio only; one of text alone,
    with fewer samples than GPUs.
    """
    return [
        batch([5, 7, 6, 4, 5], seed, vision=[0, 0, 1, 3], audio=[2, 3]),
        batch([6, 4], seed + 1, audio=[1]),
        batch([7], seed + 2),
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize("mapping", [SIDE_BY_SIDE, IN_TURN], ids=["side by side", "in turn"])
def test_missing_modalities_and_accumulated_microbatches(mapping):
    model = model_of(llama())
    oracle = oracle_of(model)
    with running_of(model, mapping) as running:
        check_gradients(running, oracle, step(), [batch([4, 6], 9, vision=[1])])
        # The second update accumulates; in the last, no sample has audio.
        check_training(running, oracle, [
            [step(20)], [step(30), [batch([5, 5, 5], 40, vision=[2])]],
            [[batch([6, 5], 50, vision=[0, 1])]],
        ])  # fmt: skip


def test_alignment_trains_projectors_only():
    """Freeze encoders and language model: a microbatch of text alone has no gradient at all."""
    frozen = {"vision": (True, False), "audio": (True, False), "llm": (True, False)}
    model = model_of(opt(), frozen)
    oracle = oracle_of(model)
    clips = dataclasses.replace(OPTIMIZER, max_grad_norm=1e-3)
    with running_of(model, SIDE_BY_SIDE, optimizer=clips) as running:
        output = check_gradients(running, oracle, step())[0]
        assert len(output.peak_bytes) == output.timeline.num_ranks == 2
        check_training(running, oracle, [[step(20)], [step(30)]], clips)
        assert running.gradients().keys() == oracle.gradients().keys()  # gradients in the optimizer


def test_frozen_towers_have_no_backward():
    """Train nothing in or before a tower."""
    model = model_of(llama(tied=False), {"vision": (True, True), "audio": (True, False)})
    oracle = oracle_of(model)
    with running_of(model, IN_TURN) as running:
        output = check_gradients(running, oracle, step())[0]
        ran = {(span.stage.module, span.op) for span in output.timeline.spans}
        assert ("vision", "forward_no_grad") in ran and ("vision", "backward") not in ran
        assert {("audio", "backward"), ("llm", "backward")} <= ran
        check_training(running, oracle, [[step(20)], [step(30)]])


def test_placeholders_masks_and_packing():
    """Put items at placeholder tokens, and pack whole rows into one."""
    tokens = {"vision": IMAGE_TOKEN, "audio": AUDIO_TOKEN}
    model = model_of(llama(), merge=ReplaceTokens(tokens), packing=True)
    oracle = oracle_of(model, replace(tokens))
    image, sound = [(IMAGE_TOKEN, 4)], [(AUDIO_TOKEN, 12)]
    runs = [image, [], image + sound, sound]
    one = batch([5, 7, 6, 4], 3, runs, vision=[0, 2], audio=[2, 3])
    with running_of(model, IN_TURN) as running:
        check_gradients(running, oracle, [one])


def test_both_styles_agree():
    """Use the same model, weights and batches."""
    config = {"vision": ParallelSpec(pp=1), "audio": ParallelSpec(pp=1)}
    model = model_of(llama())
    plan = MultimodalParallelSpec(config, ParallelSpec(pp=2), 3).plan(model)
    # All parameters decay, so that biases of keys, whose gradients are rounding error, move by more
    # than that.
    decays = dataclasses.replace(OPTIMIZER, no_decay=())
    pipeline = ParallelModel(model, plan, optimizer=decays)
    with running_of(model, SIDE_BY_SIDE, optimizer=decays) as running, pipeline as pipelined:
        for seed in (0, 10, 20):
            mine, other = running.train_step(step(seed)), pipelined.train_step(step(seed))
            assert mine.label_tokens == other.label_tokens
            assert mine.loss == pytest.approx(other.loss, rel=1e-5)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert mine.learning_rate == other.learning_rate
        theirs, start = pipelined.parameters(), dict(model.named_parameters())
        for name, value in running.parameters().items():
            moved = float((theirs[name] - start[name].detach()).norm())
            assert float((value - theirs[name]).norm()) <= 1e-3 * moved + 1e-9, name


def reading_grid(inputs):
    inputs["pixel_values"] = inputs["pixel_values"] * inputs.pop("grid", torch.ones(1)).mean()
    return inputs


def test_items_in_any_order():
    """Sort items by their rows before the split, which requires tensors with one entry per item."""
    model = model_of(llama())
    oracle = oracle_of(model)
    shuffled = batch([5, 6, 4], 7, vision=[2, 0, 2])
    model.encoders["vision"].preprocess_callback = reading_grid
    one = batch([5, 6], 7, vision=[0, 1])
    one["vision"]["grid"] = torch.ones(5, 2)
    with running_of(model, SIDE_BY_SIDE) as running:
        with pytest.raises(DataError, match=r"'grid' of 'vision' has shape \(5, 2\) for 2 items"):
            running.evaluate([one])
        check_gradients(running, oracle, [shuffled])


def test_mixed_precision():
    """Use bf16 autocast in every module's own thread: near fp32, but not equal.

    Frozen weights that can be read again are kept in bf16.
    """
    model = MultimodalModule(
        {"vision": ModalityModule(siglip(), "mlp", frozen=True)}, ModalityModule(build(llama()))
    )
    mapping = mapping_of({"vision": ((0, 1), 6)}, {"llm": ((0, 1), 10)})
    with running_of(model, mapping, precision="bf16") as running:
        oracle = oracle_of(model)  # loads the encoder, which then is a live module
        one = [batch([5, 7, 6], 3, vision=[0, 0, 2]), batch([4], 4)]
        loss = oracle.loss(one)
        loss.backward()
        found = running.execute(one).loss
        assert found == pytest.approx(loss.item(), rel=1e-2) and found != pytest.approx(loss.item())
        due = oracle.gradients()
        for name, gradient in running.gradients().items():
            assert gradient.dtype == torch.float32
            error = float((gradient - due[name]).norm())
            assert error <= 0.1 * float(due[name].norm()), name
        kept = running.parameters(trainable_only=False)
        name = "vision_encoder.module.encoder.layers.0.mlp.fc1.weight"
        assert kept[name].dtype == torch.bfloat16
