"""The comparison itself rejects wrong gradients and parameters."""

import pytest
import torch

from tests.support import parity_models as pm
from tests.support.parity_oracle import Oracle, gradient_errors, parameter_errors


@pytest.fixture(scope="module")
def gradients():
    vision = pm.build(pm.siglip(), 1)
    projector = torch.nn.Linear(24, 32)
    oracle = Oracle({"vision": (vision, projector)}, pm.build(pm.llama(), 2))
    oracle.loss([pm.batch([7, 5], 3, vision=[0, 1])]).backward()
    return oracle.gradients()


def test_equal_gradients_pass(gradients):
    assert gradient_errors({n: g for n, g in gradients.items()}, gradients) == []
    assert any(g is None for g in gradients.values())  # SigLIP's pooling head is not used


def test_every_zeroed_gradient_is_rejected(gradients):
    """Exclude key biases, whose gradients are zero in exact arithmetic."""
    passed = []
    for name, gradient in gradients.items():
        if gradient is not None:
            zeroed = {**gradients, name: torch.zeros_like(gradient)}
            if not any(name in problem for problem in gradient_errors(zeroed, gradients)):
                passed.append(name)
    layers = [f"vision_encoder.module.encoder.layers.{i}.self_attn.k_proj.bias" for i in (0, 1)]
    assert passed == layers


def test_a_gradient_off_by_a_little_is_rejected(gradients):
    name = "language_model.module.model.layers.1.mlp.up_proj.weight"
    scaled = {**gradients, name: gradients[name] * (1 + 3e-5)}
    assert len(gradient_errors(scaled, gradients)) == 1
    noisy = {**gradients, name: gradients[name] * (1 + 3e-7)}
    assert gradient_errors(noisy, gradients) == []


def test_dropped_missing_and_extra_gradients_are_rejected(gradients):
    name = "vision_encoder.projector.bias"
    assert gradient_errors({**gradients, name: None}, gradients) == [
        f"{name}: is None, should not be"
    ]
    assert gradient_errors({n: g for n, g in gradients.items() if n != name}, gradients) == [
        f"{name}: missing"
    ]
    assert gradient_errors({**gradients, "other": torch.ones(1)}, gradients) == [
        "other: not expected"
    ]
    unused = next(n for n, g in gradients.items() if g is None)
    assert len(gradient_errors({**gradients, unused: torch.zeros(1)}, gradients)) == 1


def test_nan_is_rejected(gradients):
    name = "vision_encoder.projector.bias"
    broken = {**gradients, name: gradients[name] * float("nan")}
    assert len(gradient_errors(broken, gradients)) == 1


def test_parameters_that_did_not_move_are_rejected():
    before = {"a.b.c": torch.zeros(4)}
    after = {"a.b.c": torch.full((4,), 3e-3)}
    assert parameter_errors(after, after, before, 1e-3) == []
    assert len(parameter_errors(before, after, before, 1e-3)) == 1
    skipped_a_step = {"a.b.c": torch.full((4,), 2e-3)}
    assert len(parameter_errors(skipped_a_step, after, before, 1e-3)) == 1
