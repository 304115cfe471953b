"""A multimodal model that runs multiplexed on Ray actors: start it, step it, read it back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from raymm.actors.multiplexed.group import GpuGroup
from raymm.actors.multiplexed.iteration_meta import (
    GpuStepResult,
    IterationMeta,
    IterationResult,
)
from raymm.actors.quota import Backend
from raymm.actors.rank.step_calls import StepHandle
from raymm.data import MicrobatchMeta
from raymm.data.loading.in_memory import check_split
from raymm.layout.stage_builders import reloadable_modules
from raymm.model.batch_rules import BatchError
from raymm.model.mapping_check import check_mapping, multimodal_nodes
from raymm.model.module_kind import LANGUAGE_MODEL, ModuleKind, module_kind
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.runtime.cluster import connect
from raymm.runtime.mapped_graph import (
    MappedGraph,
    ProgramKind,
    forward_parts,
    losses_of,
    stage_edges,
    timeline_of,
)
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import MultimodalActors, StepOutput, parameter_name
from raymm.runtime.skipped_step import SkippedStep, skipped_step
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import rows_of
from raymm.scheduler.multiplex.instructions import MultiplexProgram, Part, Route
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping


class PendingMultiplexedStep:
    """A step under way. :meth:`result` waits for it.

    Args:
        handle: of the GPUs' calls.
        label_tokens: of the step, which its loss was divided by.
        keep: owners of the inputs, which must outlive the step.
        skipped: makes the report of a step that was not applied, from the norm and the GPUs'
            results.
    """

    def __init__(
        self, handle: StepHandle[GpuStepResult], label_tokens: int, keep: Any,
        skipped: Callable[[float | None, Sequence[IterationResult]], SkippedStep | None],
    ) -> None:  # fmt: skip
        self._handle, self._label_tokens, self._skipped = handle, label_tokens, skipped
        self._keep = keep  # whoever owns the input references must outlive the step

    def result(self) -> StepOutput:
        """The step's output. A span's ``stage`` is the module, its rank the GPU.

        Raises:
            RankFailedError: a process died or a module raised; by name.
        """
        results = self._handle.result()
        gpus = [gpu_result.iterations for gpu_result in results]
        losses = losses_of(
            (iteration for iterations in gpus for iteration in iterations), [LANGUAGE_MODEL]
        )
        last = gpus[0][-1]
        return StepOutput(
            loss=losses[LANGUAGE_MODEL], label_tokens=self._label_tokens,
            timeline=timeline_of(gpus), grad_norm=last.grad_norm,
            learning_rate=last.learning_rate,
            peak_bytes=tuple(gpu_result.peak_bytes for gpu_result in results),
            skipped=self._skipped(losses[LANGUAGE_MODEL], [iterations[-1] for iterations in gpus]),
        )


class MultiplexedParallelModule(MultimodalActors):
    """A :class:`MultimodalModule` on one Ray actor per GPU, whose modules share GPUs as a mapping
    says. The methods are those of :class:`raymm.MultimodalParallelModule`.

    A step's microbatches run one after another, each whole through whole modules, and their
    gradients are accumulated; a mapping is planned for a step of one microbatch. Samples are
    split over a module's GPUs, also where their numbers of items differ; where none of a
    GPU's samples has a modality, its encoder does not run there. Loss, gradients and updates are
    those of one process. Dropout draws other numbers than in the pipelined style.

    Args:
        model: the description. Its live weights are sent to the GPUs that the mapping names.
        mapping: stages, GPUs and quotas of the modules (``raymm plan --multiplex``).
        microbatches: that one batch is split into, where microbatches are not given.
        lockstep, backend, group: as of :class:`raymm.MultiplexedModule`.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Raises:
        TypeError, ValueError: an option that is none, or cannot be.
        MultiplexError, ModelError: before any actor starts, for a mapping that cannot run the
            model (:func:`raymm.model.mapping_check.check_mapping`).
        ClusterError: the cluster is too small.
    """

    def __init__(
        self,
        model: MultimodalModule,
        mapping: StageMapping,
        *,
        microbatches: int = 1,
        lockstep: bool = False,
        backend: Callable[[], Backend] | None = None,
        group: GpuGroup | None = None,
        **options: Any,
    ) -> None:
        run = RuntimeOptions.of({"quota_backend": backend, **options})
        super().__init__(model, run)
        check_mapping(model, mapping)
        self.mapping, self.microbatches = mapping, microbatches
        self._mapped = MappedGraph(module_graph(model), mapping, lockstep)
        connect()
        specs = self._mapped.gpu_specs(
            multimodal_nodes(model), run, reloadable=reloadable_modules(model)
        )
        self.group = GpuGroup.of(specs, run.resources, group, run.placement)
        self._generation = self.group.generation
        self._check_weights()

    @property
    def plan(self) -> StageMapping:
        """The mapping."""
        return self.mapping

    def _arranged(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        for name in self._encoders:
            if name in microbatch:
                check_split(name, microbatch[name], "to deal them out over GPUs")
        return _items_by_row(microbatch)

    def submit(
        self,
        prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
    ) -> PendingMultiplexedStep:
        parts, meta = prepared
        self._tried.check(parts, meta)
        label_tokens = sum(microbatch.label_tokens for microbatch in meta)
        iterations: list[tuple[str, IterationMeta]] = []
        inputs: list[dict[tuple[int, Part], Any]] = [{} for _ in range(self.mapping.gpus)]
        for number, (data, microbatch) in enumerate(zip(parts, meta, strict=True)):
            ends = update and number + 1 == len(meta)
            kind = ProgramKind(microbatch.num_samples, not forward_only, ends, ends)
            program = self._mapped.program(kind)
            self.group.load(kind.key, program)
            offsets = {name: _offsets(name, microbatch) for name in self._encoders}
            layout = _layout_key(microbatch, program, offsets, forward_only)
            iteration = IterationMeta(
                self._step, self.options.seed, layout, self.group.is_new_layout(layout),
                {LANGUAGE_MODEL: 1.0}, training=not forward_only, keep_gradients=True,
                offsets=offsets, label_tokens=label_tokens, microbatch=number,
                sample_ids=tuple(microbatch.sample_ids), batch=self._accumulated,
            )
            iterations.append((kind.key, iteration))
            for gpu, gpu_inputs in enumerate(inputs):
                for part in forward_parts(program, gpu):
                    if iteration.rows(part.node, part.samples):
                        text = module_kind(part.node) is ModuleKind.LANGUAGE_MODEL
                        name = "text" if text else part.node
                        gpu_inputs[number, part] = data[name]
        handle = self.group.submit(iterations, inputs)
        batches = () if forward_only else self._note_batch(meta, update)
        self._step += update
        skipped = partial(self._skipped_step, self._step, batches)
        return PendingMultiplexedStep(handle, label_tokens, keep, skipped)

    def _skipped_step(
        self, step: int, batches: Sequence[Sequence[MicrobatchMeta]], loss: float | None,
        results: Sequence[IterationResult],
    ) -> SkippedStep | None:  # fmt: skip
        reports = [result.not_finite for result in results]
        return skipped_step(
            step, loss, results[0].grad_norm, reports, stage_edges(self._mapped.graph.edges),
            batches,
        )

    def update(self) -> float | None:
        results = self.group.run_optimizer_ops()
        self._step += 1
        skipped = self._skipped_step(self._step, self._take_batches(), None, results)
        self._say_skipped(skipped)
        return results[0].grad_norm

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Accumulated gradients of all trainable parameters, by the model's names: copies have
        each their part, until the optimizer's step sums them; here they are summed."""
        named: dict[str, torch.Tensor | None] = {}
        for part in self.group.call("gradients"):
            for place, tensor in part.items():
                full = parameter_name(*place)
                total = named.get(full)
                if total is None or tensor is None:
                    named[full] = tensor if total is None else total
                else:
                    named[full] = total + tensor
        return named

    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        """Parameters by the model's names."""
        return {
            parameter_name(node, name): value
            for gpu, gpu_parameters in enumerate(self.group.call("parameters", trainable_only))
            for (node, name), value in gpu_parameters.items()
            if self._mapped.replicas[node][0] == gpu
        }

    def quotas(self) -> list[str]:
        """Per GPU, what every module was granted in every turn."""
        return self.group.call("quotas")

    def shutdown(self) -> None:
        """End all processes, unless another model has taken them over."""
        if self.group.generation == self._generation:
            super().shutdown()


def _items_by_row(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch whose items come in the order of the rows that they belong to, so that what
    consecutive samples have is consecutive, too."""
    items: dict[str, Any] = {}
    for name, value in microbatch.items():
        if not isinstance(value, Mapping):
            items[name] = value
            continue
        index = value["sample_index"]
        order = torch.argsort(index, stable=True)
        in_order = torch.equal(order, torch.arange(len(order)))
        items[name] = value if in_order else {key: tensor[order] for key, tensor in value.items()}
    return items


def _offsets(name: str, meta: MicrobatchMeta) -> tuple[int, ...]:
    """Of every sample the first of its items of a modality, then how many there are.

    Raises:
        BatchError: items are not in the order of their samples.
    """
    rows = list(meta.items.get(name, ()))
    if rows != sorted(rows):
        raise BatchError(f"sample_index of {name!r} is {rows}; accepted: ascending row numbers")
    counts = [0] * meta.num_samples
    for row in rows:
        counts[row] += 1
    return (0, *accumulate(counts))


def _layout_key(
    meta: MicrobatchMeta,
    program: MultiplexProgram,
    offsets: Mapping[str, tuple[int, ...]],
    forward_only: bool,
) -> str:
    """What the shapes of everything that modules hand on follow from, but for the number of
    items; and which messages there are, as the first of each says what it looks like."""
    shapes = [
        (name, sorted(
            (key, tuple(shape[1:]), meta.dtypes[name][key])
            for key, shape in meta.shapes[name].items()
        ))
        for name in sorted(offsets) if name in meta.shapes
    ]
    filled = [
        bool(rows_of(transfer.samples, offsets.get(transfer.node)))
        for listed in program.instructions for instruction in listed
        if isinstance(instruction, Route) and instruction.direction is Direction.FORWARD
        for transfer in (*instruction.sends, *instruction.receives)
    ]
    key = repr((forward_only, meta.num_samples, shapes, filled))
    return hashlib.sha256(key.encode()).hexdigest()[:16]
