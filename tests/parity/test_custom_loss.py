"""A custom loss of tokens has the values and gradients of one process in any layout."""

from types import SimpleNamespace

import pytest

from raymm.errors import ModelError, PlanError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import custom_focal, parity_oracle
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_reference, oracle_of


def focal_sum(logits, labels, ignore_index, reduction):
    """Sum the loss token by token, from probabilities."""
    total = logits.sum() * 0
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label != ignore_index:
            p = row.softmax(0)[label]
            total = total - (1 - p) ** 2 * p.log()
    return total


@pytest.fixture
def model():
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    llama = ModalityModule(pm.build(pm.llama(tied=True), 3))
    return MultimodalModule({"vision": vision}, llama, token_loss=custom_focal.focal)


def step():
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([6, 8], 5, vision=[1])]


def test_one_process_computes_the_formula(model, monkeypatch):
    monkeypatch.setattr(parity_oracle, "F", SimpleNamespace(cross_entropy=focal_sum))
    check_reference(model, oracle_of(model), step())


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm", [{"pp": 2}, {"dp": 2, "sharding": "zero1"}, {"cp": 2}])
def test_gradients_equal_one_process(ray_cluster, model, llm, monkeypatch):
    monkeypatch.setattr(parity_oracle, "F", SimpleNamespace(cross_entropy=focal_sum))
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(**llm), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


def test_tensor_parallel_logits_are_rejected_first(model):
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(tp=2), 2)
    with pytest.raises(PlanError, match="tp of 'llm' is 2, under which no process has all logits"):
        spec.apply(model, optimizer=OPTIMIZER)


def test_one_of_two_losses_is_accepted():
    llama = ModalityModule(pm.build(pm.llama(tied=True), 3))
    with pytest.raises(ModelError, match="preference and token_loss are given; accepted: one"):
        MultimodalModule(
            None, llama, preference=PreferenceLoss(), token_loss=custom_focal.focal
        )
