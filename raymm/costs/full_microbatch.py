"""The microbatch that profiles are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymm.data import DataConfig, local_steps
from raymm.errors import PlanError

# Number of steps that are searched for a microbatch with every modality.
MAX_STEPS = 8


def full_microbatch(config: DataConfig, modalities: Sequence[str]) -> dict[str, Any]:
    """Return a microbatch with every modality, from the first step that has one. Of several, the
    one with the most items is chosen, then the one with the most text. Raises PlanError if there is
    none in the first :data:`MAX_STEPS` steps."""
    found_modalities: set[str] = set()
    for step in local_steps(config, steps=MAX_STEPS):
        complete = [
            (sum(map(len, meta.items.values())), meta.num_samples * meta.seq_len, -index)
            for index, meta in enumerate(step.meta) if set(modalities) <= set(meta.items)
        ]
        if complete:
            return step.microbatches[-max(complete)[2]]
        found_modalities |= {name for meta in step.meta for name in meta.items}
    missing = sorted(set(modalities) - found_modalities)
    shortage = f"no sample with {missing}" if missing else f"no microbatch with all of {modalities}"
    raise PlanError(f"the first {MAX_STEPS} steps of data.train have {shortage}; nothing to run")
