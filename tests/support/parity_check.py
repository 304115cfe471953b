"""Comparison of a model on actors with the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.parallel_module import StepOutput
from tests.support.parity_oracle import (
    MergeRow,
    Oracle,
    Visible,
    gradient_errors,
    label_tokens,
    parameter_errors,
    prepend,
)
from tests.support.trainer_groups import trainer_groups

# eps keeps elements whose gradient is rounding error from moving at the full rate; the norm makes
# clipping take effect in every step.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.1)
LOSS_TOLERANCE = 1e-6

Step = Sequence[Mapping[str, Any]]


def oracle_of(
    model: MultimodalModule, merge: MergeRow = prepend, visible: Visible | None = None
) -> Oracle:
    """Return an oracle with copies of the model's weights."""
    model.materialize()
    encoders = {name: (one.module, one.projector) for name, one in model.encoders.items()}
    return Oracle(encoders, model.language_model.module, merge, visible)


def close(actual: float, expected: float, tolerance: float = LOSS_TOLERANCE) -> bool:
    return abs(actual - expected) <= tolerance * abs(expected)


def check_reference(model: MultimodalModule, oracle: Oracle, step: Step) -> None:
    """Check that ``MultimodalModule.forward`` and its gradients equal the oracle's."""
    model.zero_grad()
    count = label_tokens(step)
    loss = sum(model(**one, label_tokens=count) for one in step)
    expected = oracle.loss(step)
    assert close(loss.item(), expected.item())
    assert loss.requires_grad == expected.requires_grad
    if loss.requires_grad:
        loss.backward()
        oracle.zero_grad()
        expected.backward()
        mine = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert gradient_errors(mine, oracle.gradients()) == []
        model.zero_grad()


def check_gradients(
    parallel: ParallelModel, oracle: Oracle, *steps: Step
) -> list[StepOutput]:
    """Check loss and every gradient, accumulated over ``steps``.

    Evaluation returns the same loss and leaves no gradient.
    """
    parallel.optimizer.zero_grad()
    oracle.zero_grad()
    outputs = []
    for step in steps:
        expected = oracle.loss(step)
        if expected.requires_grad:
            expected.backward()
        evaluated = parallel.evaluate(step)
        assert close(evaluated.loss, expected.item())
        if not outputs:
            assert all(g is None for g in parallel.gradients().values())
        outputs.append(parallel.execute(step))
        assert close(outputs[-1].loss, expected.item())
        assert outputs[-1].label_tokens == label_tokens(step)
    assert gradient_errors(parallel.gradients(), oracle.gradients()) == []
    return outputs


def check_training(
    parallel: ParallelModel,
    oracle: Oracle,
    updates: Sequence[Sequence[Step]],
    config: OptimizerConfig = OPTIMIZER,
) -> None:
    """Check loss, gradient norm and parameters over AdamW steps with clipping.

    The model must have been started with ``config``. Every update is a list of steps whose
    gradients are accumulated. Updates of several steps use ``execute`` and ``optimizer.step``,
    those of a single step ``train_step``.
    """
    parallel.optimizer.zero_grad()
    oracle.zero_grad()
    trained = {n: p for n, p in oracle.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(
        trainer_groups(oracle, config.weight_decay), lr=config.lr, betas=config.betas,
        eps=config.eps,
    )
    for steps in updates:
        losses = [oracle.loss(step) for step in steps]
        sum(losses).backward()
        expected = torch.nn.utils.clip_grad_norm_(trained.values(), config.max_grad_norm).item()
        assert expected > config.max_grad_norm, "clipping is not exercised"
        optimizer.step()
        optimizer.zero_grad()
        if len(steps) == 1:
            output = parallel.train_step(steps[0])
            outputs, norm = [output], output.grad_norm
            assert output.learning_rate == config.lr
        else:
            outputs = [parallel.execute(step) for step in steps]
            norm = parallel.optimizer.step()
        for output, loss in zip(outputs, losses, strict=True):
            assert close(output.loss, loss.item(), 1e-5)
        assert close(norm, expected, 1e-5)
        assert all(g is None for g in parallel.gradients().values())
    after = {name: p.detach() for name, p in trained.items()}
    assert parameter_errors(parallel.parameters(), after, before, config.lr) == []
