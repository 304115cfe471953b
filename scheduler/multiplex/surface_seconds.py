"""What a mapping's instructions take, by scaling surfaces and interference (Mosaic §3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Instruction, Op


@dataclass(frozen=True)
class SurfaceSeconds:
    """As :data:`raymm.scheduler.schedule.simulate.GroupSeconds` says, by what disturbs a module on
    the GPU where it runs (eq. 7 and 8). Modules that the problem does not have take no time.

    Attributes:
        problem: with surfaces and interference.
        plan: of a mapping of the problem.
        forward_share: share of a module's iteration that is its forward.
    """

    problem: MappingProblem
    plan: Plan
    forward_share: float = 1 / 3

    def __call__(self, instruction: Instruction, quotas: Mapping[str, float]) -> float:
        """Of an instruction in a group of modules with these quotas."""
        module = instruction.stage.module
        if module not in self.problem.names:
            return 0.0
        return self._share(instruction.op) * module_seconds(
            self.problem, module, len(self.plan.replicas(module)), quotas
        )

    def whole(self) -> dict[tuple[StageId, Op], float]:
        """Per stage and operation, on a whole device."""
        return {
            (stage.id, op): self(Instruction(op, stage.id), {stage.module: 1.0})
            for stage in self.plan.stages for op in (*FORWARDS, Op.BACKWARD)
        }

    def _share(self, op: Op) -> float:
        return 1 - self.forward_share if op in BACKWARDS else self.forward_share


def module_seconds(
    problem: MappingProblem, module: str, degree: int, quotas: Mapping[str, float]
) -> float:
    """An iteration of a module on one of its GPUs (eq. 7).

    Args:
        problem: with surfaces and interference.
        module: one of its modules.
        degree: GPUs that the module is on.
        quotas: of the modules that run on this GPU, itself too; what the problem does not have
            disturbs nobody.
    """
    steps = {name: round(quota * problem.steps) for name, quota in quotas.items()}
    index = {name: m for m, name in enumerate(problem.names)}
    # In the order of the problem, so that sums do not depend on who asks.
    others = sorted(index[name] for name in quotas if name in index and name != module)
    use = [float(problem.bandwidth[m, steps[problem.names[m]]]) for m in others]
    m = index[module]
    delay = problem.interference.delay(float(problem.bandwidth[m, steps[module]]), use)
    alone = float(problem.seconds[m, degree.bit_length() - 1, steps[module]])
    return problem.interference.seconds(alone, delay)
