"""Common base of models that run under a plan: processes, programs and messages of steps.

A step's program is lowered for exactly the modules that each microbatch has input for. A microbatch
without images has no vision instruction. Whether a stage has a backward is decided per microbatch.
Steps from several threads reach all ranks in the same order.
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
from raymm.actors.rank.step_calls import keep_recent
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
    """Model on the actors of a plan.

    Attributes:
        parameter_ownership: per process, its shards of parameters that other processes hold, too.
    """

    @classmethod
    def check_plan(cls, model: Any, plan: Plan, options: RuntimeOptions) -> RankSpecs:
        """Check that a model can run under a plan. Needs no cluster.

        Returns:
            Specifications of the processes.

        Raises:
            PlanError: a rank needs more memory than the plan's limit, cannot update its parameters
                as configured, or the model's sizes do not fit the plan's degrees.
            ProbeError: a module cannot be cut as planned.
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
        """Start the plan's processes and return their specifications. Raises as :meth:`check_plan`,
        and PlanError, ClusterError or ModelError for host memory, cluster size or weights."""
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
        """Replace lost processes after a failure that others survived, and reconnect all. Gradients
        are dropped.

        Returns:
            Number of optimizer steps that all ranks have taken; None if ranks differ, so that their
            state must be restored.

        Raises:
            RankFailedError: another rank was lost meanwhile. The call may be repeated.
        """
        progress = self.group.renew()
        self._programs.clear()
        self._take_batches()
        return same_progress(progress)

    def _mend(self) -> None:
        """Renew the processes after a step in which a stage raised."""
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
        """Number of microbatches of the plan, into which a batch in memory is split."""
        return self.plan.num_microbatches

    @abstractmethod
    def _full_name(self, stage: StageId, name: str) -> str:
        """Return the model's name for a parameter of a stage."""

    def reschedule(self, plan: Plan) -> None:
        """Continue under a plan with another schedule or recomputation, without restarting
        processes.

        Raises:
            PlanError: the plan assigns other layers to a rank.
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
            meta: step metadata without number, seed and batch.
        """
        self._mend()
        ops = self._optimizer_ops() if update else ()
        pattern = tuple(tuple(sorted(modules)) for modules in present)
        split = tuple(samples) if self.plan.splits_samples else ()
        features = tuple(map(tuple, featured)) if any(featured) else ()
        key = self._program(pattern, ops, not meta.training, split, features)
        process_inputs: list[list[tuple[StageId, int, Any]]] = [[] for _ in self._processes.all]
        for stage, index, data in inputs:
            for number in self._processes.of_rank(self.plan.by_id[stage].rank):
                process_inputs[number].append((stage, index, data))
        meta = meta._replace(step=self._step, seed=self.options.seed, batch=self._accumulated)
        if meta.training and self._counts_first(len(present)):
            counting = self._program(pattern, (), True, split, features)
            meta = self._counted(counting, meta, process_inputs)
        handle = self.group.submit(key, meta, process_inputs)
        noted = self._note_batch(batches, update) if meta.training else ()
        if update:
            self._step += 1
        skipped = partial(self._skipped_step, self._step, noted)
        return PendingStep(handle, meta.label_tokens, keep, self._processes.all, skipped)

    @property
    def mixture(self) -> Mixture | None:
        """Mixture-of-experts configuration of the language model; None for a dense model."""
        return None

    def _counts_first(self, microbatches: int) -> bool:
        """Return True if a pass must count the routers' tokens before a training step. It is not
        needed for one stage on one process that gets all tokens in one microbatch."""
        if self.mixture is None or self.mixture.loss is None:
            return False
        stages = self.plan.module_stages(LANGUAGE_MODEL)
        return microbatches * len(stages) * stages[0].cp * stages[0].fsdp > 1

    def _counted(self, key: str, meta: StepMeta, inputs: Sequence[Any]) -> StepMeta:
        """Run the counting pass and return the step metadata with its counts."""
        results = self.group.submit(key, meta._replace(counting=True), inputs).result()
        pairs = zip(self._processes.all, results, strict=True)
        counts = [r.router_counts for p, r in pairs if p.tp == 0 and r.router_counts is not None]
        return meta._replace(router_counts=tuple(map(sum, zip(*counts, strict=True))))

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
        """Return the stages at a position of each replica that run a microbatch."""
        stages = [replica[place] for replica in self.plan.replicas(module)]
        return [stage for stage in stages if self.plan.runs(stage, microbatch)]

    @property
    def _placed(self) -> Plan:
        """Plan with the actual links between processes."""
        return on_nodes(self.plan, self.group.placement.process_nodes)

    def program(
        self, present: Sequence[Sequence[str]], update: bool = True,
        samples: Sequence[Samples] = (), featured: Sequence[Collection[str]] = (),
    ) -> Program:
        """Return the checked program of a step.

        Args:
            samples, featured: as in :func:`raymm.scheduler.schedule.lower.lower`.
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
        keep_recent(self._programs, pattern, key)
        return key

    def gradients(self) -> dict[str, torch.Tensor | None]:
        self._mend()
        named: dict[str, torch.Tensor | None] = {}
        for number, tensors in enumerate(self.group.call("gradients")):
            for (stage, name), tensor in tensors.items():
                shard_spec = self._shard_specs[stage.module]
                shard = place_of(self._processes, number, shard_spec)
                is_complete = shard_spec.sharers(name, shard) == (shard,)
                if is_complete and shard_spec.is_replica(name, shard):
                    continue  # complete and counted already
                full = self._full_name(stage, name)
                total = named.get(full)
                named[full] = (
                    total if tensor is None else self._add(total, stage, name, shard, tensor)
                )
        return named

    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        self._mend()
        named: dict[str, torch.Tensor] = {}
        first_stage: dict[str, StageId] = {}
        for number, tensors in enumerate(self.group.call("parameters", trainable_only)):
            process = self._processes.all[number]
            for (stage, name), tensor in tensors.items():
                full = self._full_name(stage, name)
                shard_spec = self._shard_specs[stage.module]
                shard = place_of(self._processes, number, shard_spec)
                has_all = shard_spec.shards == 1 and process.cp > 0  # cp process 0 holds the same
                if has_all or shard_spec.is_replica(name, shard):
                    continue
                if first_stage.setdefault(full, stage) == stage:
                    named[full] = self._add(named.get(full), stage, name, shard, tensor)
        return named

    def _add(
        self, total: torch.Tensor | None, stage: StageId, name: str, place: int,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        shard_spec = self._shard_specs[stage.module]
        count = max(shard_spec.shards, self.plan.by_id[stage].tp)
        return shard_spec.add(total, name, place, count, tensor)


def _multiprocessors(device: str) -> Multiprocessors:
    """Return the multiprocessors that quotas can divide: an H100's on CPUs and unknown GPUs."""
    return MULTIPROCESSORS.get(cluster_device(device)[0], Multiprocessors())


def process_labels(processes: Processes) -> list[str]:
    """Return a label per process: its stages, and its position in each degree above 1."""
    labels = []
    for process in processes.all:
        stages = ", ".join(str(stage.id) for stage in processes.plan.rank_stages(process.rank))
        degrees = processes.plan.degrees(process.rank)._asdict()
        positions = [f"{n} {getattr(process, n)} of {d}" for n, d in degrees.items() if d > 1]
        labels.append(f"{stages}, {', '.join(positions)}" if positions else stages)
    return labels
