"""Compare a step of a configuration's VLM on its ranks with the same step in one process.

Ranks compute in fp32, and the one process runs the model's own forward in fp32 and in fp64:

    python -m examples.vlm.check_step examples/vlm/real.yaml

Fails where the loss differs by more than 1e-5 from one process in fp32, or a gradient, relative to
its own norm, by more than 1e-5 from fp64, unless one process in fp32 has such an error, too: in a
deep pretrained model rounding alone is more than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from raymm.config.build import build_model, build_plan
from raymm.config.sections import TrainConfig, load_config
from raymm.data import local_steps
from raymm.model.vlm import PretrainedVlm
from raymm.runtime.cluster import connected
from raymm.runtime.parallel_model import ParallelModel
from raymm.training.run_start import with_vocabulary

TOLERANCE = 1e-5
ROUNDING = 2.0  # how many times one process's own largest error is rounding


class Step(NamedTuple):
    """Results of a step.

    Attributes:
        loss: of all label tokens.
        gradients: by parameter.
    """

    loss: float
    gradients: dict[str, torch.Tensor]


def steps(config: TrainConfig) -> tuple[Step, Step, Step]:
    """The first step on ranks, and in one process in fp32 and fp64. Ray has been started.

    Raises:
        ConfigError: it has no layouts, or is of a model in parts.
    """
    model = build_model(config)
    plan = build_plan(config, model)
    assert isinstance(model, PretrainedVlm) and plan is not None
    step = next(iter(local_steps(with_vocabulary(config.data, model), steps=1)))
    with ParallelModel(
        model, plan, resources=config.resources.for_device("cpu"),
        threads=config.resources.threads, timeout_s=config.run.timeout_s,
    ) as running:
        loss = running.execute(step.microbatches).loss
        gradients = {n: grad for n, grad in running.gradients().items() if grad is not None}
    return (
        Step(loss, gradients), *(
            _in_one_process(model, step.microbatches, dtype)
            for dtype in (torch.float32, torch.float64)
        )
    )  # fmt: skip


def _in_one_process(
    model: PretrainedVlm, microbatches: Sequence[Mapping[str, torch.Tensor]], dtype: torch.dtype
) -> Step:
    whole = model.materialize().to(dtype)
    whole.zero_grad()
    loss = model.loss([
        {name: v.to(dtype) if v.is_floating_point() else v for name, v in batch.items()}
        for batch in microbatches
    ])  # fmt: skip
    loss.backward()
    return Step(loss.item(), {
        name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None
    })


def errors(step: Step, due: Step) -> dict[str, float]:
    """By parameter, the norm of the difference of two gradients over the norm of what is due.

    Raises:
        ValueError: a parameter has one on one side only.
    """
    if step.gradients.keys() != due.gradients.keys():
        odd = sorted(step.gradients.keys() ^ due.gradients.keys())
        raise ValueError(f"gradients on one side only: {odd}")
    return {
        name: _relative(step.gradients[name].double(), gradient.double())
        for name, gradient in due.gradients.items()
    }


def _relative(actual: torch.Tensor, due: torch.Tensor) -> float:
    difference, norm = float((actual - due).norm()), float(due.norm())
    return difference / norm if norm else float(difference > 0)


def main(arguments: list[str] | None = None) -> int:
    """Print both; returns 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.set)
    with connected():
        ranks, single, exact = steps(config)
    loss_error = abs(ranks.loss - single.loss) / single.loss
    print(f"loss {ranks.loss:.6f} on ranks, {single.loss:.6f} in one process: {loss_error:.1e}")
    beside, ours, own = (
        errors(*pair) for pair in ((ranks, single), (ranks, exact), (single, exact))
    )
    for name, each in (
        ("ranks and one process", beside), ("ranks and fp64", ours), ("one process and fp64", own)
    ):
        worst = max(each, key=lambda parameter: each[parameter])
        print(f"{name}: {len(each)} gradients, median {median(each.values()):.1e}, "
              f"the worst differs by {each[worst]:.1e}: {worst}")
    limit = max(TOLERANCE, ROUNDING * max(own.values()))
    return int(not (loss_error <= TOLERANCE and max(ours.values()) <= limit))


if __name__ == "__main__":
    sys.exit(main())
