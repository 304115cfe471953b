"""The benchmark's 27 models: sizes near the paper's, stages as in its Table 6."""

import pytest

from benchmarks.valm_configs import (
    AUDIO,
    LLM,
    MERGED_TOKENS,
    VALM_CONFIGS,
    VISION,
    build_skeleton,
    valm_profile,
)
from raymm.scheduler.costs.layer_costs import layer_work


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind, sizes", [("llm", LLM), ("vision", VISION), ("audio", AUDIO)])
def test_sizes_are_the_papers(kind, sizes):
    for size, (layers, hidden, *_, stated) in sizes.items():
        skeleton = build_skeleton(kind, size)
        counted = sum(p.numel() for p in skeleton.parameters())
        assert counted == pytest.approx(stated, rel=0.065), (kind, size)
        _, profile = valm_profile(*({kind: size}.get(k, "S") for k in ("llm", "vision", "audio")))
        assert len(profile.modules[kind]) == layers + (kind != "llm")
        assert profile.modules[kind][0].output_bytes % hidden == 0


def test_all_27_models_exist_and_fit_the_paper():
    assert len({config.name for config in VALM_CONFIGS}) == 27
    by_name = {config.name: config for config in VALM_CONFIGS}
    assert by_name["LLM-M VALM-LM"].cornstarch == (4, 2, 2)
    assert by_name["LLM-S VALM-SL"].colocated == (1, 4)
    assert {len(config.cornstarch) for config in VALM_CONFIGS} == {3}
    assert max(max(config.cornstarch + config.colocated) for config in VALM_CONFIGS) == 6
    assert 1500 <= MERGED_TOKENS <= 4000


def test_trained_modules_determine_the_backwards():
    graph, profile = valm_profile("S", "S", "S", "align")
    work = layer_work(graph, profile)
    assert work["vision"][0].backward == 0
    assert work["vision"][-1].backward_weight > 0 and work["vision"][-1].backward_input == 0
    assert work["llm"][0].backward_input > 0 and work["llm"][0].backward_weight == 0
    graph, _ = valm_profile("S", "S", "S", "sft")
    assert layer_work(graph, profile)["llm"][0].backward_weight > 0
    graph, _ = valm_profile("S", "S", "S", "full")
    work = layer_work(graph, profile)
    assert work["vision"][0].backward_weight > 0 and work["vision"][0].backward_input == 0


def test_unknown_values_are_refused():
    with pytest.raises(ValueError, match="vision is 'XL'; accepted: S, M, L"):
        valm_profile("S", "XL", "S")
    with pytest.raises(ValueError, match="trainable is 'none'; accepted: align, sft, full"):
        valm_profile("S", "S", "S", "none")
