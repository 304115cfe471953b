"""A graph of modules on Ray actors, multiplexed: stages in sequence, the modules of a stage side
by side, each on its GPUs and its share of their multiprocessors (Mosaic §3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.multiplexed.group import GpuGroup
from raymm.actors.multiplexed.iteration_meta import GpuStepResult, IterationMeta
from raymm.actors.quota import Backend
from raymm.actors.rank.step_calls import StepHandle
from raymm.batch.dag_check import DagCheck
from raymm.model.modality_module import ModelError
from raymm.model.module_dag import ModuleDag
from raymm.runtime.cluster import connect
from raymm.runtime.mapped_graph import (
    MappedGraph,
    ProgramKind,
    cut_entries,
    forward_parts,
    losses_of,
    stage_edges,
    timeline_of,
)
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import not_finite_weights
from raymm.runtime.skipped_step import SkippedStep, skipped_step, warn_of
from raymm.scheduler.multiplex.instructions import MultiplexProgram, Part
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.program.timeline import Timeline

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MultiplexedOutput:
    """Outcome of an iteration.

    Attributes:
        loss: of the whole batch: what :class:`ModuleDag` gives in one process.
        losses: what it is the sum of.
        seconds: from the first GPU's beginning to the last one's end.
        end: when that was, by the hosts' clocks; ends of iterations submitted ahead are as far
            apart as iterations take.
        timeline: when each node ran on each GPU; a span's ``stage`` is the node, its
            ``microbatch`` the turn, or of several microbatches which.
        sent_bytes: between GPUs, without the sums of gradients.
        grad_norm: global gradient norm before clipping, if the iteration updated.
        learning_rate: the rate used, if it did.
        skipped: why the update was not applied; None if it was, or there was none. Samples have
            their numbers for names.
    """

    loss: float
    losses: dict[str, float]
    seconds: float
    end: float
    timeline: Timeline
    sent_bytes: int = 0
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: SkippedStep | None = None


class PendingIteration:
    """An iteration under way. :meth:`result` waits for it.

    Args:
        results: of the GPUs' calls.
        losses: names of the losses.
        step: its number.
        edges: of the graph, (producer, consumer).
    """

    def __init__(
        self, results: StepHandle[GpuStepResult], losses: list[str], step: int,
        edges: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        self._results, self._losses = results, losses
        self._step, self._edges = step, edges

    def result(self) -> MultiplexedOutput:
        """What it gave.

        Raises:
            RankFailedError: a process died or a module raised; by name.
        """
        gpus = [iterations.iterations for iterations in self._results.result()]
        results = [result for iterations in gpus for result in iterations]
        losses = losses_of(results, self._losses)
        start, end = min(r.start for r in results), max(r.end for r in results)
        last, loss = gpus[0][-1], sum(losses.values())
        reports = [iterations[-1].not_finite for iterations in gpus]
        return MultiplexedOutput(
            loss, losses, end - start, end,
            timeline_of(gpus, slots=len(gpus[0]) == 1), sum(r.sent_bytes for r in results),
            last.grad_norm, last.learning_rate,
            skipped_step(self._step, loss, last.grad_norm, reports, stage_edges(self._edges)),
        )


class MultiplexedModule:
    """A :class:`ModuleDag` on one Ray actor per GPU.

    :class:`raymm.storage.checkpoint.CheckpointStore` saves it,
    :func:`raymm.storage.loading.restore` loads it, also under another mapping.

    Args:
        dag: the model. Live weights are copied to the GPUs that the mapping names.
        mapping: stages, GPUs and quotas of the modules; losses that it does not name run after
            the last stage, where their last producer is.
        lockstep: every stage begins on all GPUs at once, as the performance model has it;
            otherwise a GPU goes on as soon as it has what it needs.
        backend: makes the streams' backend in every process; by default green contexts on CUDA,
            and books of who ran when on a CPU.
        group: processes of another model that is no longer used, to run this one in: as many,
            of the same device, threads and timeout. Starting processes takes longer than anything
            else here.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`, without
            ``precision``. What modules draw depends on the seed, the step, the module's name and
            its first sample: repeatable, but other numbers with another degree.

    Raises:
        TypeError: an option that is none.
        ValueError: a device, threads or a timeout that cannot be, or that ``group`` has not.
        MultiplexError: a mapping that is not of this graph.
        ModelError: weights that are not finite.
        ClusterError: the cluster is too small.
        RankFailedError: a process cannot start.
    """

    def __init__(
        self,
        dag: ModuleDag,
        mapping: StageMapping,
        *,
        lockstep: bool = False,
        backend: Callable[[], Backend] | None = None,
        group: GpuGroup | None = None,
        **options: Any,
    ) -> None:
        run = RuntimeOptions.of({"quota_backend": backend, **options}, without=("precision",))
        for name in dag.graph.losses:
            if readers := dag.graph.consumers(name):
                raise ModelError(
                    f"{readers[0]!r} reads {name!r}, which is a loss; a mapping runs graphs whose "
                    "losses nobody reads, a plan any (raymm.PipelinedModule)"
                )
        self.dag, self.mapping, self.lockstep = dag, mapping, lockstep
        self.options, self._step = run, 0
        self._check = DagCheck(dag)
        self._mapped = MappedGraph(dag.graph, mapping, lockstep)
        self.replicas = self._mapped.replicas
        nodes = dag.specs().values()
        connect()
        specs = self._mapped.gpu_specs(nodes, run)
        self._group = GpuGroup.of(specs, run.resources, group, run.placement)
        self._generation = self._group.generation
        if names := self.not_finite_tensors():
            self.close()
            raise not_finite_weights(names)

    @property
    def plan(self) -> StageMapping:
        """The mapping."""
        return self.mapping

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far."""
        return self._step

    def restore_step(self, step: int) -> None:
        """Say how many optimizer steps the loaded state has taken."""
        self._step = step

    def reloadable(self) -> frozenset[str]:
        """Nodes whose frozen weights no checkpoint need hold."""
        return self.dag.reloadable()

    @property
    def group(self) -> GpuGroup:
        """The processes.

        Raises:
            RuntimeError: they were handed to another model. That they have ended is said by what
                is called.
        """
        if self._group.generation != self._generation:
            raise RuntimeError("the processes run another model by now; this one has none")
        return self._group

    def program(self, batch: int, train: bool = True, update: bool = False) -> MultiplexProgram:
        """The checked program of a batch of so many samples.

        Args:
            batch: samples.
            train: with backward passes.
            update: with the optimizer's step.
        """
        return self._mapped.program(ProgramKind(batch, train, train, update))

    def execute(self, batch: Batch | Sequence[Batch]) -> MultiplexedOutput:
        """Forward and backward of one batch. :meth:`gradients` are then those of its loss; those
        of earlier batches are forgotten.

        Args:
            batch: entries (samples, ...), as of :meth:`ModuleDag.forward`; or microbatches, which
                run one after another and whose gradients are accumulated. Means over samples are
                then those over all; what compares all samples compares a microbatch's.

        Raises:
            BatchError, ModelError: a batch that does not fit. Nothing of it was sent: the model
                goes on with the next one.
            RankFailedError: a process died or a module raised; by name. Nothing runs any more.
        """
        return self.submit(batch, update=False).result()

    def train_step(self, batch: Batch | Sequence[Batch]) -> MultiplexedOutput:
        """:meth:`execute` and the optimizer's step. A step that is not finite is not applied:
        ``skipped`` of the output says why, and a
        :class:`raymm.runtime.skipped_step.SkippedStepWarning`."""
        output = self.submit(batch).result()
        if output.skipped is not None:
            warn_of(output.skipped)
        return output

    def evaluate(self, batch: Batch | Sequence[Batch]) -> MultiplexedOutput:
        """Loss only, all modules in evaluation mode; no gradients."""
        return self.submit(batch, train=False, update=False).result()

    def submit(
        self, batch: Batch | Sequence[Batch], *, train: bool = True, update: bool = True
    ) -> PendingIteration:
        """Start an iteration and return at once; iterations run in the order submitted. With
        the next one submitted before the last one's result is read, no GPU waits for the driver.

        Args:
            batch: as of :meth:`execute`.
            train: with backward; otherwise as :meth:`evaluate`.
            update: with the optimizer's step; otherwise as :meth:`execute`.
        """
        if update and not train:
            raise ValueError("update is True without train; accepted: both, train alone, neither")
        batches = [batch] if isinstance(batch, Mapping) else list(batch)
        if not batches:
            raise ValueError("batch is an empty list; accepted: at least one microbatch")
        for microbatch in batches:
            self._check.check(microbatch)
        scales = self.dag.scales(*batches)
        iterations: list[tuple[str, IterationMeta]] = []
        inputs: list[dict[tuple[int, Part], Batch]] = [{} for _ in range(self.mapping.gpus)]
        for number, microbatch in enumerate(batches):
            last = number + 1 == len(batches)
            kind = ProgramKind(
                self.dag.batch_size(microbatch), train, train and last, update and last
            )
            program = self._mapped.program(kind)
            self.group.load(kind.key, program)
            layout = _layout_key(microbatch, train)
            iterations.append((kind.key, IterationMeta(
                self._step, self.options.seed, layout, self.group.is_new_layout(layout), scales,
                train, keep_gradients=number > 0, microbatch=number,
            )))
            for gpu, gpu_inputs in enumerate(inputs):
                for part in forward_parts(program, gpu):
                    if reads := self.dag.nodes[part.node].reads:
                        gpu_inputs[number, part] = cut_entries(microbatch, reads.values(), part)
        results = self.group.submit(iterations, inputs)
        self._step += update
        losses = [n for n, node in self.dag.nodes.items() if node.loss]
        return PendingIteration(results, losses, self._step, self.dag.graph.edges)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Gradients of all trainable parameters after :meth:`execute`, by the names that
        :class:`ModuleDag` has for them; None where there is none."""
        return self._of_first_replicas(self.group.call("gradients"))

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters, by the names that :class:`ModuleDag` has for them."""
        return self._of_first_replicas(self.group.call("parameters"))

    def _of_first_replicas(self, per_gpu: list[dict[tuple[str, str], torch.Tensor]]) -> dict:
        return {
            f"{node}.{name}": value
            for gpu, tensors in enumerate(per_gpu)
            for (node, name), value in tensors.items()
            if self.replicas[node][0] == gpu
        }

    def not_finite_tensors(self) -> list[str]:
        """Names, as in checkpoints, of parameters and optimizer state with values that are not
        finite, and how many."""
        named = self.group.call("not_finite_tensors")
        return list(dict.fromkeys(name for names in named for name in names))

    def quotas(self) -> list[str]:
        """Per GPU, what every module was granted in every turn."""
        return self.group.call("quotas")

    def close(self) -> None:
        """End all processes, unless another model has taken them over. Closing twice does
        nothing."""
        if self._group.generation == self._generation:
            self._group.shutdown()

    def __enter__(self) -> MultiplexedModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layout_key(batch: Batch, train: bool) -> str:
    """What the shapes of everything that modules hand on follow from."""
    shapes = sorted((name, tuple(t.shape), str(t.dtype)) for name, t in batch.items())
    return hashlib.sha256(repr((train, shapes)).encode()).hexdigest()[:16]
