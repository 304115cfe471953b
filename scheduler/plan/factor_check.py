"""Check of the numbers of microbatches that share a forward of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.schedules.registry import find_schedule


def check_factors(
    graph: ModuleGraph, replicas: Mapping[str, Sequence[Sequence[Stage]]], num_microbatches: int,
    schedule_name: str,
) -> None:
    """Raise ``PlanError``, which names the module, for a factor that its module, its layout or the
    schedule does not support."""
    for node in graph.nodes:
        stages = [stage for replica in replicas[node.name] for stage in replica]
        stage, factor = stages[0], stages[0].microbatch_factor
        check_number(f"microbatch_factor of {node.name!r}", factor)
        if any(other.microbatch_factor != factor for other in stages):
            raise PlanError(
                f"microbatch_factor differs between stages of {node.name!r}; all stages of a "
                "module must have the same"
            )
        if factor == 1:
            continue
        producers = [producer for producer, consumer in graph.edges if consumer == node.name]
        count = len(replicas[node.name])
        for refused, reason, accepted in (
            (bool(producers), f"receives from {', '.join(producers)}", "a module without inputs "
             "from other modules"),
            (node.loss, "computes a loss", "a module without loss"),
            (len(stages) > count, f"has {len(stages) // count} stages", "one stage (pp 1)"),
            (stage.split != "microbatches", f"splits {stage.split}", "split 'microbatches'"),
            (any(s.quota is not None for s in stages), "has a quota", "no quota"),
            (find_schedule(schedule_name).uses_slots, f"runs under schedule {schedule_name!r}",
             "another schedule"),
            (any(s.recompute for s in stages), "is recomputed as a whole",
             "recompute false, or recompute_layers"),
            (num_microbatches % (factor * count) > 0,
             f"has {num_microbatches} microbatches in {count} replicas",
             "a number of microbatches that factor * dp divides"),
        ):
            if refused:
                raise PlanError(
                    f"microbatch_factor of {node.name!r} is {factor}, but the module {reason}; "
                    f"accepted: {accepted}, or microbatch_factor 1"
                )
