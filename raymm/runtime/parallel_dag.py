"""A graph of modules on Ray actors.

Modules run in stages on separate or shared ranks, process microbatches, and may have replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.batch.dag_check import DagCheck
from raymm.errors import DataError, PlanError
from raymm.layout.plan_check import differences
from raymm.model.module_dag import ModuleDag
from raymm.plural import plural
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.pending_step import PendingStep
from raymm.runtime.plan_module import PlannedModule
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.stage_samples import Samples, stage_samples

Batch = Mapping[str, torch.Tensor]


class DagParallelModule(PlannedModule):
    """:class:`ModuleDag` on the actors of a :class:`Plan` (see :func:`raymm.dag_plan` and
    :func:`raymm.plan_of_mapping`).

    Means over samples are taken over all samples of a step, whatever its number of microbatches.
    Losses that compare all samples (:func:`raymm.every`) compare those of a microbatch. Gradients
    equal those of one process that accumulates the losses of the microbatches.

    :class:`raymm.storage.checkpoint.CheckpointStore` saves the model;
    :func:`raymm.storage.loading.restore` loads it, also under another plan.

    Args:
        dag: the model. Live weights are sent to the ranks that own them.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Raises:
        PlanError: the plan is for another graph, or cannot split samples or parameters as it
            states. Other errors are those of :class:`raymm.MultimodalParallelModule`.
    """

    model: ModuleDag

    def __init__(self, dag: ModuleDag, plan: Plan, **options: Any) -> None:
        super().__init__(dag, RuntimeOptions.of(options))
        if texts := differences(plan.graph, dag.graph):
            raise PlanError(f"the plan does not match this graph: {'; '.join(texts)}")
        self._check = DagCheck(dag)
        self._start(plan)

    def _full_name(self, stage: StageId, name: str) -> str:
        return f"{stage.module}.{self.model.nodes[stage.module].parameter_name(name)}"

    def reloadable(self) -> frozenset[str]:
        return self.model.reloadable()

    def prepare(self, batch: Batch | Sequence[Batch]) -> list[Batch]:
        """Return the microbatches of a step, at most as many as the plan has.

        Args:
            batch: entries (samples, ...), which are split into microbatches of equal size, or a
                list of microbatches.

        Raises:
            DataError, ModelError: the batch does not fit the model.
        """
        most = self.plan.num_microbatches
        if isinstance(batch, Mapping):
            self._check.check(batch)
            batches = _split(batch, self.model.batch_size(batch), most)
        else:
            batches = list(batch)
            if not 1 <= len(batches) <= most:
                raise DataError(
                    f"a step has {plural(len(batches), 'microbatch', 'es')}; accepted: 1 to "
                    f"{most}, as in the plan"
                )
        for microbatch in batches:
            self._check.check(microbatch)
        return batches

    def submit(
        self, prepared: Sequence[Batch], update: bool = False, forward_only: bool = False,
        keep: Any = None,
    ) -> PendingStep:  # fmt: skip
        nodes = self.model.nodes
        samples = [Samples(self.model.batch_size(microbatch)) for microbatch in prepared]
        inputs = [
            (stage.id, index, _entries(microbatch, node.reads.values(), sample_ranges[0]))
            for index, microbatch in enumerate(prepared)
            for name, node in nodes.items() if node.reads
            for stage in self._readers(name, index)
            if (sample_ranges := stage_samples(self.plan, stage, samples[index]))
        ]
        sizes = [microbatch_samples.size for microbatch_samples in samples]
        noisy = any(node.noise for node in nodes.values())
        step = StepMeta(
            step=self._step, label_tokens=0, keys=tuple(map(_layout_key, prepared)),
            training=not forward_only, scales=self.model.scales(*prepared),
            first_samples=tuple(accumulate(sizes[:-1], initial=0)) if noisy else (),
            sample_counts=tuple(sizes),
        )
        return self._submitted(
            [nodes] * len(prepared), inputs, step, update=update, keep=keep, samples=samples
        )

    def close(self) -> None:
        """End all processes."""
        self.shutdown()


def _entries(batch: Batch, names: Iterable[str], samples: Range) -> dict[str, torch.Tensor]:
    if samples.size == len(next(iter(batch.values()))):
        return {name: batch[name] for name in names}
    # Copies: views would bring the whole batch along.
    return {name: batch[name][slice(*samples)].clone() for name in names}


def _split(batch: Batch, samples: int, parts: int) -> list[Batch]:
    if samples % parts:
        raise DataError(
            f"a batch of {samples} samples does not divide into {parts} microbatches; accepted: a "
            "multiple of that number, or a list of microbatches"
        )
    size = samples // parts
    # Copies: views would bring the whole batch along.
    return [
        {name: value[lo : lo + size].clone() for name, value in batch.items()}
        for lo in range(0, samples, size)
    ]


def _layout_key(batch: Batch) -> LayoutKey:
    """Return a key that determines the shapes of all messages between modules."""
    shapes = sorted((name, tuple(t.shape), str(t.dtype)) for name, t in batch.items())
    structure = [(name, len(shape), dtype) for name, shape, dtype in shapes]
    sizes = tuple(size for _, shape, _ in shapes for size in shape)
    return LayoutKey(hash(repr(shapes)), hash(repr(structure)), sizes)
