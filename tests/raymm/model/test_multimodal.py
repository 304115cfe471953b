"""Language models that can continue a text from their cache, found by a trial instead of a list."""

import pytest

from benchmarks.shared.family_check import runnable
from benchmarks.shared.family_classes import LANGUAGE, named
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, why_not_written
from raymm.runtime.generation import check_generates
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec


def model_of(name):
    family = named(LANGUAGE, name)
    config, _ = runnable(family, False)
    return ModalityModule(family.model_class(config))


@pytest.mark.parametrize(("name", "reason"), [
    ("LlamaForCausalLM", None), ("Gemma3ForCausalLM", None), ("OPTForCausalLM", None),
    ("Lfm2ForCausalLM", None), ("BloomForCausalLM", None),
    ("OpenAIGPTLMHeadModel", "does not accept cached keys and values"),
    ("RobertaForCausalLM", "computes different logits for token 7"),
    # Its layers have states of the last text.
    ("RecurrentGemmaForCausalLM", "computes different logits for token 7"),
])
def test_models_that_continue_from_their_cache(name, reason):
    answer = why_not_written(model_of(name).source())
    assert answer is None if reason is None else name in answer and reason in answer


def test_other_models_are_refused_before_generation():
    model = MultimodalModule({}, model_of("RobertaForCausalLM"))
    spec = MultimodalParallelSpec({}, ParallelSpec(), 1)

    class Parallel:
        plan = spec.plan(model)

    Parallel.model = model
    assert Parallel.plan.module_stages(LANGUAGE_MODEL)
    with pytest.raises(ModelError, match="from cached keys and values: RobertaForCausalLM"):
        check_generates(Parallel())
