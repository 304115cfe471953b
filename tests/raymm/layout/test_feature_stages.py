"""Cached first blocks of encoders, their cached outputs, and plans without them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BeitConfig, LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.features.kept_features import every_item
from raymm.actors.modules.message import Message
from raymm.actors.stages.stage_inputs import (
    PLAIN,
    joined,
    kept_entries,
    message_of_entries,
    to_side,
)
from raymm.layout.feature_stages import featured_modules, what_changes, with_feature_stages
from tests.support.frozen_first_blocks import PICTURES, model_of


def plan_of(model, pp=1):
    spec = raymm.MultimodalParallelSpec(
        encoder_specs={"vision": raymm.ParallelSpec(pp=pp)}, num_microbatches=2
    )
    return spec.plan(model)


@pytest.mark.parametrize(("config", "reason"), [
    (SiglipVisionConfig(**PICTURES), None),
    (SiglipVisionConfig(attention_dropout=0.1, **PICTURES), "draw random numbers"),
    (BeitConfig(drop_path_rate=0.0, **PICTURES), None),
    # Its first block is dropped with probability 0, only later ones are dropped at times.
    (BeitConfig(drop_path_rate=0.1, **PICTURES), "draw random numbers"),
])  # fmt: skip
def test_random_features_are_not_cached(config, reason) -> None:
    changes = what_changes(model_of(config).encoder_spec("vision"), 2)
    assert changes is None if reason is None else reason in changes


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_first_blocks_have_a_separate_stage(pp) -> None:
    model = model_of(SiglipVisionConfig(**PICTURES))
    plan = plan_of(model, pp)
    before = [stage.layers[0] for stage in plan.module_stages("vision")]
    first = min([2, *before[1:2]])  # the first trained block, or the end of the first stage
    blocks, reasons = featured_modules(model, plan, ["vision"])
    assert blocks == {"vision": first} and not reasons
    stages = with_feature_stages(plan, blocks).module_stages("vision")
    assert [stage.layers[0] for stage in stages] == sorted({*before, first})
    assert [stage.index for stage in stages] == list(range(len(stages)))


def test_modules_frozen_later_are_not_cached() -> None:
    """Exclude it, as its weights come from the run and not from its source."""
    model = model_of(SiglipVisionConfig(**PICTURES), None, frozen=True)
    assert featured_modules(model, plan_of(model), ["vision"])[0] == {"vision": 4}
    model.set_changing({"vision"})
    blocks, reasons = featured_modules(model, plan_of(model), ["vision"])
    assert not blocks and "run.at changes" in reasons[0]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4),
    st.dictionaries(st.sampled_from(["a", "b/c", "d=e"]), st.sampled_from(
        ["float", "travels", "integer", "plain"]), max_size=3),
)  # fmt: skip
def test_additional_outputs_are_cached(shape, items, kinds) -> None:
    values = {
        "float": torch.ones(items, *shape), "travels": torch.randn(items, *shape),
        "integer": torch.randint(9, (items, *shape)), "plain": {"size": [1, None, "x"]},
    }
    inputs = {name: values[kind] for name, kind in kinds.items()}
    travels = [name for name, kind in kinds.items() if kind == "travels"]
    hidden = torch.randn(items, 2, 3)

    def message(own, rows):
        return Message((rows,), to_side(own, travels, "vision"))

    whole = message(inputs, hidden)
    if not any(isinstance(value, torch.Tensor) for value in inputs.values()):
        alone = [message(inputs, hidden[i : i + 1]) for i in range(items)]
    else:
        alone = [
            message(own, hidden[i : i + 1]) for i, own in enumerate(every_item(inputs))
        ]
    entries = kept_entries(joined(alone))
    assert all(len(entry) == items for entry in entries.values())
    again = message_of_entries(entries)
    for result in (joined(alone), again):
        assert torch.equal(result.tensors[0], hidden) and set(result.side) == set(whole.side)
        for name, entry in whole.side.items():
            assert result.side[name].dtype == entry.dtype or name.startswith(PLAIN)
            assert torch.equal(result.side[name], entry)


def test_a_plan_leaves_out_cached_features() -> None:
    """Give an encoder that was most of the work one rank of four once its features are known."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    vision = SiglipVisionConfig(image_size=224, patch_size=16, num_hidden_layers=12, **sizes)
    language = LlamaConfig(vocab_size=128, num_hidden_layers=8, **sizes)
    encoder = raymm.ModalityModule(vision, "mlp", frozen=True)
    model, ranks = raymm.MultimodalModule({"vision": encoder}, language), {}
    for keeps in (False, True):
        planned = raymm.plan(
            model, ranks=4, tokens={"vision": 400, "llm": 128}, microbatches=8, samples=2,
            layouts=("modality_parallel",), keeps_features=keeps,
        )
        ranks[keeps] = {stage.rank for stage in planned.plan.module_stages("vision")}
        assert any("are cached" in note for note in planned.notes) is keeps
    assert len(ranks[True]) == 1 < len(ranks[False])
