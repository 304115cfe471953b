"""Greedy tokens of VLMs in pipelines and tensor parallelism equal transformers' generate."""

from __future__ import annotations

import pytest
import torch
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.errors import ModelError
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.vlm import from_pretrained
from raymm.model.vlm_batch import split_rows
from raymm.runtime.generation import Prompt, generate
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, vlm_plan

pytestmark = pytest.mark.usefixtures("ray_cluster")
TOKENS = 7
# Positions in three dimensions; features into layers of both stages; bidirectional images and
# windows; audio.
QWEN2_5, QWEN3 = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
GEMMA3, AUDIO = "Gemma3ForConditionalGeneration", "GlmAsrForConditionalGeneration"


def rows_of(model, batch, items_in_last):
    """Return separate rows without padding.

    Args:
        items_in_last: True if the last row has all items; False if every row has one.
    """
    towers = {tower.name: tuple(entry for _, entry in tower.arguments) for tower in model.towers}
    rows = len(batch["input_ids"])
    index = {name: torch.full((rows,), rows - 1) for name in towers} if items_in_last else {}
    for row in split_rows(batch, towers, index, rows):
        shape, real = row["input_ids"].shape, row["attention_mask"][0].bool()
        yield {n: v[:, real] if v.shape[:2] == shape else v for n, v in row.items()}


def prompts_of(name, folder):
    """Return a model with large weights, and prompts with one item, text alone, and two items.

    The weights are so large that every token depends on all previous ones.
    """
    model_class = getattr(transformers, name)
    config, batches = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    whole = from_pretrained(config, batches[0], seed=4).materialize()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    whole.save_pretrained(folder)
    model = from_pretrained(folder, batches[0])
    return model, [
        row for number, batch in enumerate(batches) for row in rows_of(model, batch, number == 2)
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [(QWEN3, {"pp": 2}), (QWEN3, {"tp": 2}), (QWEN2_5, {"pp": 2}), (GEMMA3, {"pp": 2, "tp": 2}),
     (AUDIO, {"pp": 2})],
)  # fmt: skip
def test_tokens_equal_transformers_generate(tmp_path, name, layout):
    model, batches = prompts_of(name, tmp_path / "folder")
    whole = model.materialize().eval()
    due = [
        whole.generate(
            **{n: value for n, value in batch.items() if n != "labels"}, max_new_tokens=TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, batch["input_ids"].shape[1] :].tolist()
        for batch in batches
    ]  # fmt: skip
    assert len(batches) == 6 and len({token for text in due for token in text}) > 5
    specs = {LANGUAGE_MODEL: ParallelSpec(**layout)}
    with ParallelModel(model, vlm_plan(model, specs), timeout_s=120) as parallel:
        before = parallel.evaluate([batches[0]]).loss
        prompts = [Prompt(p[0], m[0]) for p, m in (parallel.prepare([b]) for b in batches)]
        assert list(generate(parallel, prompts, TOKENS)) == due
        assert list(generate(parallel, prompts[::-1], TOKENS, under_way=1)) == due[::-1]
        assert parallel.evaluate([batches[0]]).loss == before


def test_layouts_without_generation_are_rejected(tmp_path):
    model, _ = prompts_of(GEMMA3, tmp_path / "folder")
    parallel = ParallelModel.__new__(ParallelModel)
    parallel.model = model
    parallel.plan = vlm_plan(model, {LANGUAGE_MODEL: ParallelSpec(cp=2)})
    with pytest.raises(ModelError, match="without cp, sharding 'fsdp' or a mapping"):
        next(generate(parallel, [], 1))
