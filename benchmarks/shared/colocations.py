"""Synthetic colocations of modules, for fitting and testing performance models.

The ground truth is not eq. 8 of Mosaic but the textbook model of a shared memory bus, a closed
queueing network: a module alternates between computing and transferring. Alone, its transfers take
a share B of its time; concurrent transfers share the bus equally (processor sharing). Mean value
analysis (Reiser and Lavenberg, 1980) gives the exact slowdown. Two modules delay each other by
exactly ``B1 * B2`` of their time alone, the product of eq. 8. With more modules, each is delayed by
its use times that of the others, which grows as all of them slow down: the rapid rise towards
saturation that the paper's Fig. 8b shows and an additive model misses.

Modules are those of the mapping problems, whose compute intensity varies by an order of magnitude
as in Mosaic's Table 1: some use little of the bandwidth and some nearly all. (Uniformly drawn uses
would suit an additive model better than real modules do.) Plans are random: powers of two of the
GPUs, tenths of quota, as many modules per GPU as fit. A module's time is that of its slowest
replica (eq. 7).
"""

from __future__ import annotations

import numpy as np

from benchmarks.shared.mapping_instances import random_work
from raymm.scheduler.costs.interference import Colocation

GPUS = 4
STEPS = 10


def bus_slowdowns(use: tuple[float, ...]) -> tuple[float, ...]:
    """Return each module's colocated time over its time alone, by mean value analysis."""
    queue: dict[int, dict[int, float]] = {0: {}}
    everyone = (1 << len(use)) - 1
    cycle: dict[int, float] = {}
    for some in range(1, everyone + 1):
        members = [i for i in range(len(use)) if some >> i & 1]
        transfer = {i: use[i] * (1.0 + sum(queue[some ^ 1 << i].values())) for i in members}
        cycle = {i: 1.0 - use[i] + transfer[i] for i in members}
        queue[some] = {i: transfer[i] / cycle[i] for i in members}
    return tuple(cycle[i] for i in range(len(use)))


def random_colocations(
    seed: int, plans: int, modules: int, noise: float
) -> tuple[list[Colocation], list[Colocation]]:
    """Return random colocations of so many modules: measured with relative noise, and without."""
    rng = np.random.default_rng([seed, modules])
    noisy, true = [], []
    for _ in range(plans):
        works = [
            random_work(rng, f"m{m}", float(np.exp(rng.uniform(np.log(0.05), np.log(2.0)))))
            for m in range(modules)
        ]
        placed = _random_plan(rng, modules)
        on_gpu = [[m for m, (gpus, _) in placed.items() if g in gpus] for g in range(GPUS)]
        use = {m: works[m].bandwidth(quota / STEPS) for m, (_, quota) in placed.items()}
        slow = [bus_slowdowns(tuple(use[m] for m in here)) for here in on_gpu]
        for m, (gpus, quota) in placed.items():
            if all(len(on_gpu[g]) == 1 for g in gpus):
                continue
            groups = tuple(
                (use[m], *(use[o] for o in on_gpu[g] if o != m)) for g in gpus
            )
            alone = works[m].seconds(len(gpus), quota / STEPS)
            seconds = alone * max(slow[g][on_gpu[g].index(m)] for g in gpus)
            measured = seconds * (1.0 + noise * float(rng.standard_normal()))
            noisy.append(Colocation(alone, groups, measured))
            true.append(Colocation(alone, groups, seconds))
    return noisy, true


def _random_plan(rng: np.random.Generator, modules: int) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return the GPUs and quota of every module that still fits."""
    free = np.full(GPUS, STEPS)
    result = {}
    for m in rng.permutation(modules):
        degree = 1 << int(rng.integers(0, 1 + GPUS.bit_length() - 1))
        quota = int(rng.integers(1, 7))
        fits = np.flatnonzero(free >= quota)
        if len(fits) < degree:
            continue
        # Prefer GPUs that already host other modules.
        chosen = fits[np.argsort(free[fits] + rng.random(len(fits)))][:degree]
        free[chosen] -= quota
        result[int(m)] = tuple(sorted(int(g) for g in chosen)), quota
    return result
