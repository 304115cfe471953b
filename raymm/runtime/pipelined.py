"""A multimodal model that runs pipelined on Ray actors: start it, step it, read it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.data import MicrobatchMeta
from raymm.data.loading.in_memory import check_split
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.head_dims import check_head_dims
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import MultimodalActors, parameter_name
from raymm.runtime.plan_module import PendingStep, PlannedModule
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId


class MultimodalParallelModule(PlannedModule, MultimodalActors):
    """A :class:`MultimodalModule` on Ray actors (made by ``MultimodalParallelSpec.apply``).

    Joins the Ray cluster at hand, or starts one on this machine.

    A step loop::

        outputs = parallel.execute(batch)
        optimizer.step()

    Args:
        model: the description. Its live weights are sent to the ranks that own them.
        plan: what runs where.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Attributes:
        holdings: per process, what it has of parameters that others have too.

    Raises:
        TypeError, ValueError: an option that is none, or cannot be.
        PlanError: before any actor starts, if a rank needs more memory than the plan's limit, or
            has quotas that its device cannot set apart.
        ProbeError: before any actor starts, if a module cannot be cut as planned.
        ClusterError: if the cluster is too small.
        ModelError: if weights are not finite.
    """

    def __init__(self, model: MultimodalModule, plan: Plan, **options: Any) -> None:
        super().__init__(model, RuntimeOptions.of(options))
        shared = {stage.module for stage in plan.stages if stage.cp > 1}
        check_head_dims(model, self.options, shared)
        self._tried.retries.update(self._start(plan).builders.retries)

    def _full_name(self, stage: StageId, name: str) -> str:
        return model_name(stage, name)

    def _arranged(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        encoders = self.model.encoders
        for name in {stage.module for stage in self.plan.stages if stage.sharding == "fsdp"}:
            # What a callback makes of its inputs, only the rank sees.
            if name in encoders and name in microbatch and not encoders[name].preprocess_callback:
                check_split(name, microbatch[name], "with sharding 'fsdp'")
        return microbatch

    def submit(
        self,
        prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
    ) -> PendingStep:
        parts, meta = prepared
        self._tried.check(parts, meta)
        inputs: list[tuple[StageId, int, Any]] = []
        for index, (part, microbatch) in enumerate(zip(parts, meta, strict=True)):
            rows = {name: torch.tensor(i, device="cpu") for name, i in microbatch.items.items()}
            read = [
                (LANGUAGE_MODEL if name == "text" else name, data) for name, data in part.items()
            ]
            inputs += [
                (stage.id, index, data)
                for module, data in (*read, (LANGUAGE_MODEL, {"sample_index": rows}))
                for stage in self._readers(module, index)
            ]
        step = StepMeta(
            step=self._step,
            label_tokens=sum(microbatch.label_tokens for microbatch in meta),
            keys=tuple(_layout_key(microbatch) for microbatch in meta),
            sample_ids=tuple(tuple(microbatch.sample_ids) for microbatch in meta),
            training=not forward_only,
        )
        present = [microbatch.items for microbatch in meta]
        return self._submitted(present, inputs, step, meta, update, keep)


def model_name(stage: StageId, name: str) -> str:
    """``(StageId("vision", 0), "module.x")`` -> ``"vision_encoder.module.x"``."""
    return parameter_name(stage.module, name)


def _layout_key(meta: MicrobatchMeta) -> LayoutKey:
    """What decides the layout of every message of a microbatch: its shapes and dtypes, which rows
    its items belong to, and how long its rows are (without padding, no mask travels)."""
    tensors = [
        (part, name, tuple(shape), meta.dtypes[part][name])
        for part, shapes in sorted(meta.shapes.items())
        for name, shape in sorted(shapes.items())
    ]
    items = tuple((name, tuple(rows)) for name, rows in sorted(meta.items.items()))
    lengths = tuple(meta.lengths)
    longest = max(lengths, default=0)
    whole = all(length == longest for length in lengths)
    structure = (
        [(part, name, len(shape), dtype) for part, name, shape, dtype in tensors],
        [name for name, _ in items], whole,
    )
    sizes = [
        *(size for _, _, shape, _ in tensors for size in shape),
        *(len(rows) for _, rows in items), len(lengths), longest, sum(lengths),
    ]
    return LayoutKey(hash((tuple(tensors), items, lengths)), hash(repr(structure)), tuple(sizes))
