"""Encoders that run one forward for several microbatches equal one process."""

import parity_models as pm
import pytest
from parity_check import OPTIMIZER, check_gradients, check_training, oracle_of

from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec


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
    ("audio", "frozen", "schedule", "dp"),
    [
        (False, False, "1f1b", 1), (False, True, "zero_bubble", 1), (True, False, "1f1b", 2),
        (True, False, "gpipe", 1),
    ],
)
def test_groups_equal_one_process(ray_cluster, audio, frozen, schedule, dp):
    model = model_of(audio, frozen)
    if frozen:
        model.freeze(encoders=True, projectors=True, llm=False)
    oracle = oracle_of(model)
    spec = ParallelSpec(microbatch_factor=2, dp=dp)
    layout = MultimodalParallelSpec(
        {"vision": spec} | ({"audio": ParallelSpec(microbatch_factor=4)} if audio else {}),
        ParallelSpec(pp=2), 4, schedule,
    )
    with layout.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step(audio))
        check_gradients(parallel, oracle, step(audio)[1:], step(audio)[:1])  # fewer than planned
        check_training(parallel, oracle, [[step(audio)], [step(audio)[::-1]]])
