"""What a mapping's modules take, by scaling surfaces and interference (Mosaic §3.3)."""

from __future__ import annotations

from collections.abc import Mapping

from raymm.scheduler.multiplex.problem import MappingProblem


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
