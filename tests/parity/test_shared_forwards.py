"""Encoders that run one forward for several microbatches equal one process."""

import pytest

from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, vlm_plan
from tests.parity.test_vlms_on_ray import check, whole
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of


def model_of(audio: bool = True, frozen: bool = False) -> MultimodalModule:
    encoders = {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=frozen)}
    if audio:
        encoders["audio"] = ModalityModule(pm.build(pm.whisper(), 2), "linear")
    return MultimodalModule(encoders, ModalityModule(pm.build(pm.llama(tied=True), 3)))


def step(audio: bool = True) -> list[dict]:
    """Return four microbatches of different sizes; some lack a modality."""
    modalities = [
        {"vision": [0, 0], "audio": [1]}, {"vision": [0, 1]}, {"audio": [0]},
        {"vision": [1], "audio": [0, 1]},
    ]
    return [
        pm.batch([7, 5], number, **{k: v for k, v in entry.items() if audio or k == "vision"})
        for number, entry in enumerate(modalities, 4)
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("schedule", "vision", "audio"),
    [
        ("zero_bubble", {}, None), ("zero_bubble", {"frozen": True}, None), ("1f1b", {"dp": 2}, 4),
        ("gpipe", {"tp": 2}, 4), ("1f1b", {"cp": 2}, None),
        ("1f1b", {"dp": 2, "sharding": "fsdp"}, None),
    ],
)  # fmt: skip
def test_groups_equal_one_process(ray_cluster, schedule, vision, audio):
    vision = dict(vision)  # a parameter of the test must not change
    frozen = vision.pop("frozen", False)
    model = model_of(audio is not None, frozen)
    if frozen:
        model.freeze(encoders=True, projectors=True, llm=False)
    oracle = oracle_of(model)
    factors = {"vision": ParallelSpec(microbatch_factor=2, **vision)}
    if audio:
        factors["audio"] = ParallelSpec(microbatch_factor=audio)
    layout = MultimodalParallelSpec(factors, ParallelSpec(pp=2), 4, schedule)
    microbatches = step(audio is not None)
    with layout.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, microbatches)
        check_gradients(parallel, oracle, microbatches[1:], microbatches[:1])  # fewer than planned
        check_training(parallel, oracle, [[microbatches], [microbatches[::-1]]])


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "name", ["Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration"]
)
def test_towers_equal_the_models_own_forward(ray_cluster, name):
    model, microbatches = whole(name)
    step = [*microbatches, microbatches[0], microbatches[0]][:4]
    specs = {"vision": ParallelSpec(microbatch_factor=2), "llm": ParallelSpec(pp=2)}
    check(model, vlm_plan(model, specs, 4), step)
