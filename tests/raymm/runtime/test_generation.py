"""Greedy tokens of pipelines and tensor parallelism equal those of transformers' generate."""

from typing import Any

import pytest
import torch

from raymm.actors.modules.token_layout import MASKS
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.generation import Prompt, generate
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm

PROMPTS = [[5, 17, 3], [40, 2, 9, 31, 77, 8, 1, 60], [11], [25, 26, 27, 28], [70, 3]]
TOKENS = 9  # the window of the Gemma model is shorter
CONFIGS = {"llama": pm.llama, "gemma3": pm.gemma3, "gpt2": pm.gpt2, "qwen3": pm.qwen3}
LAYOUTS = [{"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2, "chunks": 1}]


def build(config, seed: int) -> Any:
    """Return a model with weights large enough that every token depends on all previous ones."""
    module = pm.build(config, seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return module


def expected(module, prompts, **inputs) -> list[list[int]]:
    """Generate one after the other in one process, without the model's end token."""
    module.eval()
    found = []
    for ids in prompts:
        out = module.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, **inputs,
        )
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.cells(1)
@pytest.mark.parametrize(("name", "layout"), [
    ("llama", LAYOUTS[0]), ("llama", LAYOUTS[1]), ("gemma3", LAYOUTS[0]), ("gemma3", LAYOUTS[1]),
    ("gpt2", LAYOUTS[0]), ("llama", LAYOUTS[2]),
])
def test_tokens_of_text(ray_cluster, name, layout):
    module = build(CONFIGS[name](), 3)
    due = expected(module, PROMPTS)
    assert len({token for text in due for token in text}) > 5
    model = MultimodalModule({}, ModalityModule(module))
    spec = MultimodalParallelSpec({}, ParallelSpec(**layout), 2)
    with spec.apply(model) as parallel:
        prompts = [Prompt.of_text(ids) for ids in PROMPTS]
        assert list(generate(parallel, prompts, TOKENS)) == due
        assert list(generate(parallel, prompts, TOKENS, under_way=1)) == due
        ends = {due[0][4], due[2][1]}
        short = [text[: min((text.index(e) for e in ends if e in text), default=TOKENS)]
                 for text in due]
        assert list(generate(parallel, iter(prompts), TOKENS, ends)) == short


@pytest.mark.cells(1)
@pytest.mark.parametrize("mask", [None, "multimodal"])
def test_tokens_after_images(ray_cluster, mask):
    """Compare a tiny vision-language model with transformers' generate on merged embeddings."""
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    module = build(pm.llama(), 3)
    model = MultimodalModule({"vision": vision}, ModalityModule(module), mask=MASKS.get(mask))
    batches = [pm.batch([size], seed, vision=[0]) for seed, size in enumerate([3, 8, 2, 5])]
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 1)
    with spec.apply(model) as parallel:
        before = parallel.evaluate(batches[1]).loss
        prompts = []
        for batch in batches:
            parts, meta = parallel.prepare([{**batch, "labels": batch["input_ids"]}])
            prompts.append(Prompt(parts[0], meta[0]))
        found = list(generate(parallel, prompts, TOKENS))
        assert parallel.evaluate(batches[1]).loss == before
        with pytest.raises(ModelError, match="cp"):
            refused = MultimodalParallelSpec({}, ParallelSpec(cp=2), 1).plan(model)
            parallel.plan = refused
            next(generate(parallel, prompts, 1))
    if mask is not None:
        assert all(len(text) == TOKENS for text in found)
        return
    tower, projector, due = vision.module, vision.projector, []
    assert tower is not None and projector is not None
    for batch in batches:
        features = projector(tower(batch["vision"]["pixel_values"])[0])
        embeds = torch.cat([features, module.get_input_embeddings()(batch["input_ids"])], dim=1)
        due.append(module.eval().generate(
            inputs_embeds=embeds, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )[0].tolist())
    assert found == due
