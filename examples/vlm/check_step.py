"""One step of a configuration's whole model on its ranks, beside the same step of the model's own
forward in one process, in fp32:

    python -m examples.vlm.check_step examples/vlm/real.yaml

Fails where the loss, or a gradient relative to its own norm, differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys

import torch

from raymm.config.build import build_model, build_plan
from raymm.config.sections import TrainConfig, load_config
from raymm.data import local_steps
from raymm.model.whole_model import WholeModel
from raymm.runtime.cluster import connected
from raymm.runtime.whole.pipelined import WholeParallelModule
from raymm.training.run_start import with_vocabulary

TOLERANCE = 1e-5


def differences(config: TrainConfig) -> tuple[float, float, dict[str, float]]:
    """Losses of the ranks and of one process, and by parameter the relative error of its gradient:
    the norm of the difference over the norm of what is due. Ray has been started.

    Raises:
        ConfigError: it has no layouts, or is of a model in parts.
    """
    model = build_model(config)
    plan = build_plan(config, model)
    assert isinstance(model, WholeModel) and plan is not None
    step = next(iter(local_steps(with_vocabulary(config.data, model), steps=1)))
    loss = model.loss(step.microbatches)
    loss.backward()
    due = {
        name: p.grad for name, p in model.materialize().named_parameters() if p.grad is not None
    }
    with WholeParallelModule(
        model, plan, resources=config.resources.for_device("cpu"),
        threads=config.resources.threads, timeout_s=config.run.timeout_s,
    ) as running:
        output = running.execute(step.microbatches)
        found = {name: grad for name, grad in running.gradients().items() if grad is not None}
    if found.keys() != due.keys():
        raise ValueError(f"gradients on one side only: {sorted(found.keys() ^ due.keys())}")
    return output.loss, loss.item(), {
        name: _relative(found[name], gradient) for name, gradient in due.items()
    }


def _relative(actual: torch.Tensor, due: torch.Tensor) -> float:
    difference, norm = float((actual.double() - due.double()).norm()), float(due.double().norm())
    return difference / norm if norm else float(difference > 0)


def main(arguments: list[str] | None = None) -> int:
    """Print both; returns 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.set)
    with connected():
        loss, due, errors = differences(config)
    worst = max(errors, key=lambda name: errors[name])
    print(f"loss {loss:.6f} on ranks, {due:.6f} in one process: {abs(loss - due) / due:.1e}")
    print(f"{len(errors)} gradients, the worst differs by {errors[worst]:.1e}: {worst}")
    return int(not (abs(loss - due) <= TOLERANCE * due and errors[worst] <= TOLERANCE))


if __name__ == "__main__":
    sys.exit(main())
