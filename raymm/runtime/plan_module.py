"""What models have in common that run under a plan, whatever they are: the processes, programs and
messages of their steps.

A step's program is lowered for exactly the modules that each microbatch has input for: one without
images has no vision instruction anywhere, and whether a stage has a backward is decided per
microbatch. Steps of several threads reach all ranks in one order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.optimizer.progress import same_progress
from raymm.actors.quota import Multiprocessors
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.step_calls import remember
from raymm.costs.named_devices import cluster_device
from raymm.costs.scaling_estimates import MULTIPROCESSORS
from raymm.data import MicrobatchMeta
from raymm.errors import PlanError
from raymm.layout.host_memory import check_hosts, host_needs
from raymm.layout.optimizer_check import check_optimizer
from raymm.layout.parameter_owners import place_of, reduction_groups
from raymm.layout.plan_check import check_fits, check_grants
from raymm.layout.rank_specs import RankSpecs, rank_specs
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.runtime.cluster import connect
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.pending_step import PendingStep, grad_norm
from raymm.runtime.skipped_step import SkippedStep, skipped_step
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.rank_nodes import on_nodes, straddling
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import ProgramReport, check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.program.issue_order import shared_gradients
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.stage_costs import op_seconds


class PlannedModule(ParallelModule):
    """A model on the actors of a plan.

    Attributes:
        plan: what runs where.
        parameter_ownership: per process, what it has of parameters that others have too.
    """

    @classmethod
    def check_plan(cls, model: Any, plan: Plan, options: RuntimeOptions) -> RankSpecs:
        """Check that a model can run under a plan; needs no cluster.

        Args:
            model: the description.
            plan: what runs where.
            options: how it runs.

        Returns:
            What the processes are built from.

        Raises:
            PlanError: if a rank needs more memory than the plan's limit, or cannot update its
                parameters as asked for, or the model's sizes do not fit the plan's degrees.
            ProbeError: if a module cannot be cut as planned.
        """
        check_fits(plan)
        check_optimizer(options.optimizer, plan, options.autocast is not None)
        return rank_specs(
            model, plan, optimizer=options.optimizer, autocast=options.autocast,
            exact_autocast=options.exact_autocast, device=options.device, threads=options.threads,
            kernels=options.kernels, quota_backend=options.quota_backend,
            timeout_s=options.timeout_s, nccl_timeout_s=options.nccl_timeout_s,
            features=options.features, seed=options.seed,
        )  # fmt: skip

    def _start(self, plan: Plan) -> RankSpecs:
        """Start the plan's processes; returns what they were built from.

        Raises:
            PlanError, ProbeError: before any actor starts, as of :meth:`check_plan`; also of
                quotas that the device cannot set apart.
            PlanError: also later, if a node lacks host memory for copies of what trains.
            ClusterError: if the cluster is too small.
            ModelError: if weights are not finite.
        """
        run = self.options
        ranks = self.check_plan(self.model, plan, run)
        connect()
        if any(stage.quota is not None for stage in plan.stages):
            check_grants(plan, _multiprocessors(run.device))
        self.plan = plan
        self._programs: OrderedDict[tuple, str] = OrderedDict()
        self._shard_specs = ranks.builders.shard_specs
        self._processes = processes = ranks.processes
        self.parameter_ownership = ranks.ownership
        self._reduces = any(ownership.shared for ownership in ranks.ownership)
        self._shared_gradients = shared_gradients(
            (group.stages, {processes.all[process].rank for process in group.processes})
            for group in reduction_groups(ranks.ownership)
        )
        degrees = tuple(map(plan.degrees, range(plan.num_ranks)))
        self.group = RankGroup(
            ranks.specs, process_labels(processes), run.reserved,
            replace(run.placement, degrees=degrees),
        )
        if (astride := straddling(plan, self.group.placement.process_nodes)) is not None:
            run.placement.say(astride)
        self._check_weights()
        if any(run.copies):
            needs = host_needs(ranks, self.model, run.optimizer, run.copies, run.device)
            try:
                check_hosts(needs, self.group.call("host_memory"))
            except PlanError:
                self.shutdown()
                raise
        return ranks

    def renew(self) -> int | None:
        """After a failure that processes have survived: put others in the places of those that are
        lost, and connect all anew. Gradients are dropped.

        Returns:
            Optimizer steps that all ranks have taken, if that is where they all are. None: they go
            on from what somebody gives them.

        Raises:
            RankFailedError: another rank was lost meanwhile; it may be tried again.
        """
        progress = self.group.renew()
        self._programs.clear()
        self._take_batches()
        return same_progress(progress)

    def _mend(self) -> None:
        """After a step that ended by what a stage raised, and that others are to follow.

        Raises:
            RankFailedError: that one, if it was the optimizer's step of some ranks, and not of all.
        """
        if (failure := self.group.interrupted) is None:
            return
        steps = self.renew()
        if steps is None:
            self.shutdown()
            raise failure.kind(
                f"{failure.message}\nThe failure interrupted an optimizer step that only some "
                "ranks have applied, so the model cannot continue"
            )
        self.restore_step(steps)

    @property
    def microbatches(self) -> int:
        """That a batch in memory is split into: the plan's."""
        return self.plan.num_microbatches

    @abstractmethod
    def _full_name(self, stage: StageId, name: str) -> str:
        """What the model calls a parameter of a stage."""

    def reschedule(self, plan: Plan) -> None:
        """Go on under a plan with another schedule or recomputation; nothing is restarted.

        Raises:
            PlanError: if it puts other layers on a rank.
        """
        def places(plan: Plan) -> dict[StageId, tuple]:
            return {
                s.id: (s.layers, s.rank, s.degrees, s.sharding, s.ep, s.layer_options, s.quota)
                for s in plan.stages
            }

        if plan.graph != self.plan.graph or places(plan) != places(self.plan):
            raise PlanError(
                "stages of the new plan differ in layers or ranks from the running stages; "
                "start a new model with this plan"
            )
        self.plan = plan
        self._processes = Processes(plan)
        self._programs.clear()

    def _submitted(
        self,
        present: Sequence[Iterable[str]],
        inputs: Iterable[tuple[StageId, int, Any]],
        meta: StepMeta,
        batches: Sequence[MicrobatchMeta] = (),
        update: bool = False,
        keep: Any = None,
        samples: Sequence[Samples] = (),
        featured: Sequence[Collection[str]] = (),
    ) -> PendingStep:
        """Start a step.

        Args:
            present: per microbatch, the modules it has input for.
            inputs: (stage that reads them, microbatch, dict of tensors or a Ray reference to one).
            meta: of the step, but for its number, seed and batch.
            batches: what is known of the microbatches.
            update: with the optimizer's step.
            keep: held until the result was read.
            samples, featured: as of :func:`raymm.scheduler.schedule.lower.lower`.
        """
        self._mend()
        ops = self._optimizer_ops() if update else ()
        pattern = tuple(tuple(sorted(modules)) for modules in present)
        split = tuple(samples) if self.plan.splits_samples else ()
        features = tuple(map(tuple, featured)) if any(featured) else ()
        key = self._program(pattern, ops, not meta.training, split, features)
        of_process: list[list[tuple[StageId, int, Any]]] = [[] for _ in self._processes.all]
        for stage, index, data in inputs:
            for number in self._processes.of_rank(self.plan.by_id[stage].rank):
                of_process[number].append((stage, index, data))
        meta = meta._replace(step=self._step, seed=self.options.seed, batch=self._accumulated)
        if meta.training and self._counts_first(len(present)):
            counting = self._program(pattern, (), True, split, features)
            meta = self._counted(counting, meta, of_process)
        handle = self.group.submit(key, meta, of_process)
        noted = self._note_batch(batches, update) if meta.training else ()
        if update:
            self._step += 1
        skipped = partial(self._skipped_step, self._step, noted)
        return PendingStep(handle, meta.label_tokens, keep, self._processes.all, skipped)

    @property
    def mixture(self) -> Mixture | None:
        """What the language model is as a mixture of experts; None if there is none."""
        return None

    def _counts_first(self, microbatches: int) -> bool:
        """Whether a pass before a training step is to count where routers send its tokens: one
        stage on one process that gets all of it in one microbatch knows that by itself."""
        if self.mixture is None or self.mixture.loss is None:
            return False
        stages = self.plan.module_stages(LANGUAGE_MODEL)
        return microbatches * len(stages) * stages[0].cp * stages[0].fsdp > 1

    def _counted(self, key: str, meta: StepMeta, inputs: Sequence[Any]) -> StepMeta:
        """What ranks are told of a training step, after a pass that counts for it. Processes that
        share every token's work count the same.

        Raises:
            RankFailedError: if a rank died or raised.
        """
        results = self.group.submit(key, meta._replace(counting=True), inputs).result()
        pairs = zip(self._processes.all, results, strict=True)
        parts = [r.router_counts for p, r in pairs if p.tp == 0 and r.router_counts is not None]
        return meta._replace(router_counts=tuple(map(sum, zip(*parts, strict=True))))

    def _skipped_step(
        self, step: int, batches: Sequence[Sequence[MicrobatchMeta]], loss: float | None,
        results: Sequence[StepResult],
    ) -> SkippedStep | None:  # fmt: skip
        reports = [result.not_finite for result in results]
        return skipped_step(
            step, loss, grad_norm(results), reports, self.plan.stage_edges,
            batches if all(batches) else (),
        )

    def _readers(self, module: str, microbatch: int, place: int = 0) -> list[Stage]:
        """The stages at a place of a module that run a microbatch: the first get its inputs."""
        stages = [replica[place] for replica in self.plan.replicas(module)]
        return [stage for stage in stages if self.plan.runs(stage, microbatch)]

    @property
    def _placed(self) -> Plan:
        """The plan, with the links between processes where they are."""
        return on_nodes(self.plan, self.group.placement.process_nodes)

    def program(
        self, present: Sequence[Sequence[str]], update: bool = True,
        samples: Sequence[Samples] = (), featured: Sequence[Collection[str]] = (),
    ) -> Program:
        """The checked program of a step.

        Args:
            present: per microbatch, the modalities that it has.
            update: with the optimizer's step.
            samples, featured: as of :func:`raymm.scheduler.schedule.lower.lower`.
        """
        program = lower(self._placed, present, samples=samples, featured=featured)
        self._prove(program, samples)
        return program.with_optimizer_ops(self._optimizer_ops() if update else ())

    def _prove(self, program: Program, samples: Sequence[Samples]) -> ProgramReport:
        seconds = None if self.plan.profile is None else op_seconds(self._placed)
        if self.plan.splits_samples:
            check_samples(self.plan, program, samples)
        return check_program(program, self._shared_gradients, seconds)

    def zero_grad(self) -> None:
        self._mend()
        super().zero_grad()

    def update(self) -> float | None:
        self._mend()
        results = self.group.run_optimizer_ops(self._optimizer_ops())
        self._step += 1
        skipped = self._skipped_step(self._step, self._take_batches(), None, results)
        self._say_skipped(skipped)
        return grad_norm(results)

    def _optimizer_ops(self) -> tuple[Op, ...]:
        return (
            OPTIMIZER_OPS
            if self._reduces
            else tuple(op for op in OPTIMIZER_OPS if op != Op.REDUCE_GRADS)
        )

    def _program(
        self, present: tuple, ops: tuple[Op, ...], forward_only: bool,
        samples: tuple[Samples, ...], featured: tuple[tuple[str, ...], ...],
    ) -> str:
        pattern = (present, ops, forward_only, samples, featured)
        key = self._programs.get(pattern)
        if key is None:
            program = lower(self._placed, present, None, forward_only, None, samples, featured)
            proof = self._prove(program, samples)
            program = program.with_optimizer_ops(ops)
            ranks = [process.rank for process in self._processes.all]
            key = self.group.load_program(
                Program(tuple(program.ranks[rank] for rank in ranks)),
                [proof.issues[rank] for rank in ranks], proof.bound,
            )
        else:
            self.group.touch_program(key)
        remember(self._programs, pattern, key)
        return key

    def gradients(self) -> dict[str, torch.Tensor | None]:
        self._mend()
        named: dict[str, torch.Tensor | None] = {}
        for number, part in enumerate(self.group.call("gradients")):
            for (stage, name), tensor in part.items():
                shard_spec = self._shard_specs[stage.module]
                place = place_of(self._processes, number, shard_spec)
                whole = shard_spec.sharers(name, place) == (place,)
                if whole and shard_spec.is_replica(name, place):
                    continue  # complete, and counted already
                full = self._full_name(stage, name)
                total = named.get(full)
                named[full] = (
                    total if tensor is None else self._add(total, stage, name, place, tensor)
                )
        return named

    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        self._mend()
        named: dict[str, torch.Tensor] = {}
        of_copies: dict[str, StageId] = {}
        for number, part in enumerate(self.group.call("parameters", trainable_only)):
            process = self._processes.all[number]
            for (stage, name), tensor in part.items():
                full = self._full_name(stage, name)
                shard_spec = self._shard_specs[stage.module]
                place = place_of(self._processes, number, shard_spec)
                has_all = shard_spec.shards == 1 and process.cp > 0  # of what one before it has
                if has_all or shard_spec.is_replica(name, place):
                    continue
                if of_copies.setdefault(full, stage) == stage:
                    named[full] = self._add(named.get(full), stage, name, place, tensor)
        return named

    def _add(
        self, total: torch.Tensor | None, stage: StageId, name: str, place: int,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        shard_spec = self._shard_specs[stage.module]
        count = max(shard_spec.shards, self.plan.by_id[stage].tp)
        return shard_spec.add(total, name, place, count, tensor)


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
