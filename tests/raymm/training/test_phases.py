"""Modules that are frozen or trained from a step on."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.errors import ModelError
from raymm.training.phases import Phases
from raymm.training.result import Result

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
AT = {2: {"vision": "frozen"}, 4: {"llm": "frozen", "vision": "full"}, 9: {"llm": "full"}}


def model() -> raymm.MultimodalModule:
    vision = raymm.ModalityModule(SiglipVisionConfig(image_size=16, patch_size=8, **SIZES), "mlp")
    return raymm.MultimodalModule({"vision": vision}, LlamaConfig(vocab_size=64, **SIZES))


def test_each_phase_has_its_modules_and_its_end() -> None:
    """The change after step 9 is ignored: the run ends at 6 steps."""
    described = model()
    phases = Phases(described, AT, 6)
    for step, trained in {0: "full full", 1: "full full", 2: "frozen full", 3: "frozen full",
                          4: "full frozen", 5: "full frozen"}.items():  # fmt: skip
        phases.enter(step)
        assert " ".join(map(described.mode, ("vision", "llm"))) == trained, step
    assert [phases.end(step) for step in range(6)] == [2, 2, 4, 4, 6, 6]
    assert phases.changes(4) == "llm is frozen, vision is trained"
    assert phases.changes(3) == phases.changes(9) == ""
    assert phases.dropped(2) == ("optimizer/vision/module.",) and not phases.dropped(3)


def test_a_run_continues_after_a_phase_unless_it_is_to_end() -> None:
    phases, lines = Phases(model(), AT, 6), []
    result = Result({"step": 2}, [], None, Path())
    assert phases.go_on_after(result, lines.append) and not lines
    result.exhausted = "patience 3 is reached"
    assert not phases.go_on_after(result, lines.append)
    assert lines == ["step     2  the run ends: patience 3 is reached"]
    result.exhausted, result.stopped = None, "stopped by SIGTERM"
    assert not phases.go_on_after(result, lines.append)
    assert not phases.go_on_after(Result({"step": 3}, [], None, Path()), lines.append)


def test_phases_that_train_nothing_are_refused() -> None:
    """Projectors are separate parts."""
    parts = dict.fromkeys(("vision", "vision_projector", "llm"), "frozen")
    with pytest.raises(ModelError, match="after step 2 of run.at nothing is trained"):
        Phases(model(), {2: parts}, 6)
    Phases(model(), {2: parts}, 2)
    with pytest.raises(ModelError, match="at names 'audio'"):
        Phases(model(), {2: {"audio": "frozen"}}, 6)
