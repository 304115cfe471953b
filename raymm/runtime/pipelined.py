"""A model that runs on Ray actors: start it, step it, read it back.

A step's program is lowered for exactly the modalities that each microbatch has: one without images
has no vision instruction anywhere, and whether a stage has a backward is decided per microbatch.
Steps of several threads reach all ranks in one order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from raymm.actors.executor.executor import StepMeta, StepResult
from raymm.actors.quota import Multiprocessors
from raymm.actors.rank.rank_actor import ProcessGroups, RankSpec, remember
from raymm.actors.rank.rank_group import RankGroup, StepHandle, measured_timeline
from raymm.costs.named_devices import cluster_device
from raymm.costs.scaling_estimates import MULTIPROCESSORS
from raymm.data import MicrobatchMeta
from raymm.data.loading.in_memory import check_split
from raymm.layout.parameter_owners import parameter_ownership, place_of, reduction_groups
from raymm.layout.plan_check import check_fits, check_grants
from raymm.layout.stage_builders import reloadable_modules, stage_builders
from raymm.model.multimodal import LANGUAGE_MODEL, MultimodalModule
from raymm.runtime.cluster import connect
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import ParallelModule, StepOutput, parameter_name
from raymm.runtime.skipped_step import SkippedStep, skipped_step
from raymm.scheduler.plan.plan import Plan, PlanError, Stage
from raymm.scheduler.plan.process_grid import Process, Processes
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program, check_program
from raymm.scheduler.schedule.lower import lower


class PendingStep:
    """A step under way. :meth:`result` waits for it."""

    def __init__(
        self, handle: StepHandle, label_tokens: int, keep: Any, processes: Sequence[Process],
        skipped: Callable[[float | None, Sequence[StepResult]], SkippedStep | None],
    ) -> None:  # fmt: skip
        self._handle = handle
        self._skipped = skipped
        self._label_tokens = label_tokens
        self._keep = keep  # whoever owns the input references must outlive the step
        self._processes = processes

    def result(self) -> StepOutput:
        """The step's output.

        Raises:
            RankFailedError: if a rank died or raised.
        """
        results = self._handle.result()
        found = list(zip(self._processes, results, strict=True))
        # Processes that share a microbatch have each their part of the loss, those that share
        # every token's work all the same.
        losses = [
            (m, value) for p, result in found if p.tp == 0 for m, value in result.losses.items()
        ]
        rates = [r.learning_rate for r in results if r.learning_rate is not None]
        peaks: dict[int, int] = {}
        for process, result in found:
            peaks[process.rank] = max(peaks.get(process.rank, 0), result.peak_bytes)
        loss = sum(value for _, value in sorted(losses, key=itemgetter(0)))
        return StepOutput(
            loss=loss,
            label_tokens=self._label_tokens,
            # A rank's first process stands for it.
            timeline=measured_timeline([r for p, r in found if p.fsdp == p.cp == p.tp == 0]),
            grad_norm=_grad_norm(results),
            learning_rate=rates[0] if rates else None,
            peak_bytes=tuple(peaks[rank] for rank in sorted(peaks)),
            skipped=self._skipped(loss, results),
        )


class MultimodalParallelModule(ParallelModule):
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
        run = RuntimeOptions.of(options)
        super().__init__(model, run)
        check_fits(plan)
        connect()
        if any(stage.quota is not None for stage in plan.stages):
            check_grants(plan, _multiprocessors(run.device))
        self.plan = plan
        self._programs: OrderedDict[tuple, str] = OrderedDict()
        made = stage_builders(model, plan)
        self._tried.retries.update(made.retries)
        self._pieces = made.pieces
        self._processes = processes = Processes(plan)
        self.parameter_ownership = held = parameter_ownership(processes, made.owned, made.pieces)
        self._reduces = any(one.shared for one in held)
        specs = [
            RankSpec(
                rank=number,
                world_size=len(processes.all),
                builders={s.id: made.build[s.id] for s in plan.rank_stages(process.rank)},
                edges=plan.stage_edges,
                p2p_groups=tuple(
                    (edge, processes.p2p_groups(edge)) for edge in processes.remote_edges
                ),
                groups=processes.groups,
                process_groups=_process_groups(processes, process),
                pieces=made.pieces,
                reduction_groups=reduction_groups(held),
                parameter_ownership=held[number],
                optimizer=run.optimizer,
                autocast=run.autocast,
                reloadable=reloadable_modules(model),
                device=run.device,
                threads=run.threads,
                quotas=plan.quotas(process.rank),
                quota_backend=run.quota_backend,
                timeout_s=run.timeout_s,
            )
            for number, process in enumerate(processes.all)
        ]
        self.group = RankGroup(
            specs, process_labels(processes), run.reserved, run.placement
        )
        self._check_weights()

    @property
    def microbatches(self) -> int:
        """That a batch in memory is split into: the plan's."""
        return self.plan.num_microbatches

    def _arranged(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        encoders = self.model.encoders
        for name in {stage.module for stage in self.plan.stages if stage.sharding == "fsdp"}:
            # What a callback makes of its inputs, only the rank sees.
            if name in encoders and name in microbatch and not encoders[name].preprocess_callback:
                check_split(name, microbatch[name], "with sharding 'fsdp'")
        return microbatch

    def reschedule(self, plan: Plan) -> None:
        """Go on under a plan with another schedule or recomputation; nothing is restarted.

        Raises:
            PlanError: if it puts other layers on a rank.
        """
        def places(plan: Plan) -> dict[StageId, tuple]:
            return {s.id: (s.layers, s.rank, s.degrees, s.sharding, s.layer_options, s.quota)
                    for s in plan.stages}

        if plan.graph != self.plan.graph or places(plan) != places(self.plan):
            raise PlanError(
                "stages of the new plan differ in layers or ranks from those that run; "
                "start the model anew under it"
            )
        self.plan = plan
        self._processes = Processes(plan)
        self._programs.clear()

    def submit(
        self,
        prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
    ) -> PendingStep:
        parts, meta = prepared
        self._tried.check(parts, meta)
        ops = self._optimizer_ops() if update else ()
        key = self._program(tuple(tuple(sorted(m.items)) for m in meta), ops, forward_only)
        inputs: list[list[tuple[StageId, int, Any]]] = [[] for _ in self._processes.all]
        for index, (part, one) in enumerate(zip(parts, meta, strict=True)):
            rows = {name: torch.tensor(i, device="cpu") for name, i in one.items.items()}
            given = [(LANGUAGE_MODEL if name == "text" else name, d) for name, d in part.items()]
            for module, data in (*given, (LANGUAGE_MODEL, {"sample_index": rows})):
                stage = self._reader(module, index)
                for number in self._processes.of_rank(stage.rank):
                    inputs[number].append((stage.id, index, data))
        step = StepMeta(
            step=self._step,
            label_tokens=sum(one.label_tokens for one in meta),
            keys=tuple(_layout_key(one) for one in meta),
            seed=self.options.seed,
            sample_ids=tuple(tuple(one.sample_ids) for one in meta),
            training=not forward_only,
            batch=self._accumulated,
        )
        handle = self.group.submit(key, step, inputs)
        batches = () if forward_only else self._note_batch(meta, update)
        if update:
            self._step += 1
        skipped = partial(self._skipped_step, self._step, batches)
        return PendingStep(handle, step.label_tokens, keep, self._processes.all, skipped)

    def _skipped_step(
        self, step: int, batches: Sequence[Sequence[MicrobatchMeta]], loss: float | None,
        results: Sequence[StepResult],
    ) -> SkippedStep | None:  # fmt: skip
        reports = [result.not_finite for result in results]
        return skipped_step(
            step, loss, _grad_norm(results), reports, self.plan.stage_edges, batches
        )

    def _reader(self, module: str, microbatch: int) -> Stage:
        """The stage that gets a module's inputs of a microbatch."""
        firsts = [chain[0] for chain in self.plan.replicas(module)]
        return next(stage for stage in firsts if self.plan.runs(stage, microbatch))

    def program(self, present: Sequence[Sequence[str]], update: bool = True) -> Program:
        """The checked program of a step whose microbatches have these modalities."""
        program = lower(self.plan, present)
        check_program(program)
        return program.with_optimizer_ops(self._optimizer_ops() if update else ())

    def update(self) -> float | None:
        results = self.group.run_optimizer_ops(self._optimizer_ops())
        self._step += 1
        skipped = self._skipped_step(self._step, self._take_batches(), None, results)
        self._say_skipped(skipped, callers=4)  # of optimizer.step()
        return _grad_norm(results)

    def _optimizer_ops(self) -> tuple[Op, ...]:
        return (
            OPTIMIZER_OPS
            if self._reduces
            else tuple(op for op in OPTIMIZER_OPS if op != Op.REDUCE_GRADS)
        )

    def _program(self, present: tuple, ops: tuple[Op, ...], forward_only: bool) -> str:
        pattern = (present, ops, forward_only)
        key = self._programs.get(pattern)
        if key is None:
            program = lower(self.plan, present, forward_only=forward_only)
            check_program(program)
            program = program.with_optimizer_ops(ops)
            of_processes = tuple(program.ranks[process.rank] for process in self._processes.all)
            key = self.group.load_program(Program(of_processes))
        else:
            self.group.touch_program(key)
        remember(self._programs, pattern, key)
        return key

    def gradients(self) -> dict[str, torch.Tensor | None]:
        named: dict[str, torch.Tensor | None] = {}
        for number, part in enumerate(self.group.call("gradients")):
            for (stage, name), tensor in part.items():
                pieces = self._pieces[stage.module]
                place = place_of(self._processes, number, pieces)
                if pieces.sharers(name, place) == (place,) and pieces.is_replica(name, place):
                    continue  # complete, and counted already
                full = model_name(stage, name)
                known = named.get(full)
                named[full] = (
                    known if tensor is None else self._add(known, stage, name, place, tensor)
                )
        return named

    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        of_copies: dict[str, StageId] = {}
        for number, part in enumerate(self.group.call("parameters", trainable_only)):
            process = self._processes.all[number]
            for (stage, name), tensor in part.items():
                full = model_name(stage, name)
                pieces = self._pieces[stage.module]
                place = place_of(self._processes, number, pieces)
                has_all = pieces.shards == 1 and process.cp > 0  # of what one before it has
                if has_all or pieces.is_replica(name, place):
                    continue
                if of_copies.setdefault(full, stage) == stage:
                    named[full] = self._add(named.get(full), stage, name, place, tensor)
        return named

    def _add(
        self, known: torch.Tensor | None, stage: StageId, name: str, place: int,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        pieces = self._pieces[stage.module]
        count = max(pieces.shards, self.plan.by_id[stage].tp)
        return pieces.add(known, name, place, count, tensor)


def _grad_norm(results: Sequence[StepResult]) -> float | None:
    """All processes have the same."""
    return next((r.grad_norm for r in results if r.grad_norm is not None), None)


def model_name(stage: StageId, name: str) -> str:
    """``(StageId("vision", 0), "module.x")`` -> ``"vision_encoder.module.x"``."""
    return parameter_name(stage.module, name)


def _multiprocessors(device: str) -> Multiprocessors:
    """What a device of the connected cluster can set apart. Of a CPU, or a GPU that is not in
    raymm's table: an H100's; a process that has another says so when it starts."""
    return MULTIPROCESSORS.get(cluster_device(device)[0], Multiprocessors())


def process_labels(processes: Processes) -> list[str]:
    """Per process, the names of its stages, and which of their processes it is."""
    labels = []
    for process in processes.all:
        stages = ", ".join(str(stage.id) for stage in processes.plan.rank_stages(process.rank))
        degrees = processes.plan.degrees(process.rank)._asdict()
        places = [f"{n} {getattr(process, n)} of {d}" for n, d in degrees.items() if d > 1]
        labels.append(f"{stages}, {', '.join(places)}" if places else stages)
    return labels


def _process_groups(processes: Processes, process: Process) -> ProcessGroups:
    groups = (
        tuple(processes.of_rank(process.rank)),
        processes.data_group(process),
        processes.sample_group(process),
        processes.token_group(process),
        processes.tensor_group(process),
    )
    return ProcessGroups(*(group if len(group) > 1 else () for group in groups))


def _layout_key(meta: MicrobatchMeta) -> int:
    """What decides the layout of every message of a microbatch: its shapes and dtypes, which rows
    its items belong to, and how long its rows are (without padding, no mask travels)."""
    shapes = tuple(
        (part, tuple(sorted((k, tuple(v), meta.dtypes[part][k]) for k, v in tensors.items())))
        for part, tensors in sorted(meta.shapes.items())
    )
    items = tuple((name, tuple(rows)) for name, rows in sorted(meta.items.items()))
    return hash((shapes, items, tuple(meta.lengths)))
