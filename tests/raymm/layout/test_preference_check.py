"""Plans and models that a loss of pairs or a custom loss does not support are refused."""

import pytest
import torch

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import PlanError
from raymm.kernels.preference import PreferenceLoss
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.layout.preference_check import check_loss, check_preference
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.multiplex.problem import STEPS
from tests.support import parity_models as pm
from tests.support.multiplex_models import mapping_of


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def model_of(lora=True, projector_frozen=True, preference=None, token_loss=None):
    return MultimodalModule(
        {"vision": ModalityModule(pm.siglip(), "mlp", frozen=True,
                                  projector_frozen=projector_frozen)},
        ModalityModule(pm.llama(), lora=LoraConfig(r=2) if lora else None),
        preference=preference, token_loss=token_loss,
    )


def test_adapters_alone_may_train_with_a_base_reference():
    check_preference(model_of(preference=PreferenceLoss()), None)
    for model, first in (
        (model_of(lora=False, preference=PreferenceLoss()), "llm/"),
        (model_of(projector_frozen=False, preference=PreferenceLoss()), "vision/"),
    ):
        with pytest.raises(PlanError, match=f"trained parameters are not adapters .{first}"):
            check_loss(model, None)


def test_an_initial_reference_accepts_full_training():
    check_preference(model_of(lora=False, preference=PreferenceLoss(reference="initial")), None)


def test_plans_that_split_samples_separate_answers():
    model = model_of(preference=PreferenceLoss())
    every = ((0, 1), STEPS)
    plan = plan_of_mapping(model, mapping_of(2, {"vision": every}, {"llm": every}))
    assert plan.splits_samples
    with pytest.raises(PlanError, match="needs both answers of a pair; accepted: pp, tp"):
        check_preference(model, plan)
    check_preference(model, MultimodalParallelSpec({}, ParallelSpec(pp=2)).plan(model))


def test_a_custom_loss_needs_all_logits_on_a_process():
    model = model_of(token_loss=per_token)
    check_loss(model, MultimodalParallelSpec().plan(model))
    plan = MultimodalParallelSpec({}, ParallelSpec(tp=2)).plan(model)
    with pytest.raises(PlanError, match="tp of 'llm' is 2, under which no process has all logits"):
        check_loss(model, plan)
