"""What the stages of a plan cost: seconds per op and bytes, summed from the layers' costs."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.scheduler.costs import CostProfile, trainable_before
from raymm.scheduler.plan import Plan, Stage
from raymm.scheduler.program import Op


@dataclass(frozen=True)
class StageCost:
    """One stage on one microbatch.

    Attributes:
        forward: seconds of F (and of a recomputation).
        backward_input: seconds of B_d, of the layers that have something trainable before
            them.
        backward_weight: seconds of B_w, of the trainable layers.
        input_bytes: what it receives, which is what a checkpointed forward keeps.
        activation_bytes: what autograd keeps of the layers that have a backward.
        output_bytes: what it hands on.
        state_bytes: weights, and gradients and AdamW moments of the trainable ones.
    """

    forward: float
    backward_input: float
    backward_weight: float
    input_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    state_bytes: int = 0

    def seconds(self) -> dict[Op, float]:
        """Per compute op; what a stage does not need is simply not in its program."""
        return {
            Op.FORWARD: self.forward,
            Op.FORWARD_NO_GRAD: self.forward,
            Op.FORWARD_CHECKPOINTED: self.forward,
            Op.RECOMPUTE: self.forward,
            Op.BACKWARD: self.backward_input + self.backward_weight,
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
        }


def stage_costs(plan: Plan, profile: CostProfile | None = None) -> dict[str, StageCost]:
    """Per stage of a plan, with the frozen rules (see :mod:`raymm.scheduler.costs`).

    Args:
        plan: the plan.
        profile: layer costs; the plan's own by default.

    Raises:
        ValueError: if neither the plan nor the caller has a profile.
    """
    profile = profile or plan.profile
    if profile is None:
        raise ValueError("the plan has no cost profile")
    profile.check(plan.graph)
    before = trainable_before(plan.graph)
    return {
        stage.name: _stage_cost(plan, stage, profile, before[stage.module])
        for stage in plan.stages
    }


def _stage_cost(
    plan: Plan, stage: Stage, profile: CostProfile, before: tuple[bool, ...]
) -> StageCost:
    lo, hi = stage.layers
    layers = profile.modules[stage.module][lo:hi]
    trainable = plan.graph.node(stage.module).trainable[lo:hi]
    earlier = before[lo:hi]
    if lo > 0:
        received = profile.modules[stage.module][lo - 1].output_bytes
    else:
        received = sum(
            profile.modules[producer][-1].output_bytes
            for producer in plan.graph.producers(stage.module)
        )
    return StageCost(
        forward=sum(c.forward for c in layers),
        backward_input=sum(c.backward_input for c, b in zip(layers, earlier, strict=True) if b),
        backward_weight=sum(
            c.backward_weight for c, t in zip(layers, trainable, strict=True) if t
        ),
        input_bytes=received,
        activation_bytes=sum(
            c.activation_bytes
            for c, t, b in zip(layers, trainable, earlier, strict=True)
            if t or b
        ),
        output_bytes=layers[-1].output_bytes,
        state_bytes=sum(
            profile.state_bytes(c, t) for c, t in zip(layers, trainable, strict=True)
        ),
    )


def op_seconds(plan: Plan, profile: CostProfile | None = None) -> dict[tuple[str, Op], float]:
    """Seconds per (stage, compute op), as the lowerings and the simulator take them."""
    return {
        (name, op): seconds
        for name, cost in stage_costs(plan, profile).items()
        for op, seconds in cost.seconds().items()
    }
