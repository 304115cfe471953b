"""Model on Ray actors under a plan: processes, programs, steps and their results.

A step's program is lowered for exactly the modules that each microbatch has input for. A microbatch
without images has no vision instruction. Whether a stage has a backward is decided per microbatch.
Steps from several threads reach all ranks in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from raymm.actors.executor.step_meta import LayoutKey, StepMeta, StepResult
from raymm.actors.features.kept_features import KEYS
from raymm.actors.modules.message import Decode
from raymm.actors.optimizer.optimizer import same_progress
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.quota import Multiprocessors
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.step_calls import keep_recent
from raymm.actors.stages.language import REFERENCE
from raymm.batch.batches import Prepared, batches_of
from raymm.costs.named_devices import cluster_device
from raymm.costs.scaling_estimates import MULTIPROCESSORS
from raymm.data import MicrobatchMeta
from raymm.data.loading.builder import SampleCheck
from raymm.errors import DataError, ModelError, PlanError
from raymm.kernels.choice.choice import agreed
from raymm.kernels.flash.gpu.launch_configs import LARGEST_HEAD_DIM
from raymm.layout.host_memory import check_hosts, host_needs, offloads
from raymm.layout.parameter_owners import place_of, reduction_groups
from raymm.layout.plan_check import (
    check_compiled,
    check_fits,
    check_grants,
    check_groups,
    check_optimizer,
    differences,
)
from raymm.layout.preference_check import check_loss
from raymm.layout.rank_specs import RankSpecs, rank_specs
from raymm.model.model import Model
from raymm.model.vlm_batch import TEXT
from raymm.plural import plural
from raymm.runtime.cluster import connect
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_module import ParallelModule, PendingStep, grad_norm
from raymm.runtime.skipped_step import MAX_NAMED, SkippedStep, skipped_step
from raymm.scheduler.graph.sample_ranges import rows_of
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.rank_nodes import on_nodes, straddling
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import ProgramReport, check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.program.issue_order import shared_gradients
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program
from raymm.scheduler.program.stage_samples import Samples, carried_samples, stage_samples
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.stage_costs import op_seconds


class ParallelModel(ParallelModule):
    """Model on Ray actors.

    Connects to an existing Ray cluster, or starts one on this machine. If the plan splits
    microbatches by samples (:func:`raymm.plan_of_mapping` may do so), the items of a sample stay
    with it, and an encoder does not run for samples without items.

    A step loop::

        outputs = parallel.execute(batch)
        optimizer.step()

    The loss of a step is the sum over its label tokens divided by their number. In a graph of
    modules, means are taken over all samples of a step; losses that compare all samples
    (:func:`raymm.every`) compare those of a microbatch. Gradients equal those of one process.

    :class:`raymm.storage.checkpoint.CheckpointStore` saves the model;
    :func:`raymm.storage.loading.restore` loads it, also under another plan.

    Args:
        model: a :class:`raymm.MultimodalModule`, the result of :func:`raymm.from_pretrained`, or a
            :class:`raymm.ModuleDag`. Live weights are sent to the ranks that own them.
        plan: plan for this model.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Attributes:
        parameter_ownership: per process, its shards of parameters that other processes hold, too.
        references: reference log-probabilities of preference pairs by row id, from :meth:`scores`
            before training.

    Raises:
        TypeError, ValueError: an option is unknown or invalid.
        PlanError: before any actor starts, if the plan is for another model, splits it in a way
            that it does not support, needs more memory than its limit on a rank, or has quotas that
            a device does not support.
        ProbeError: before any actor starts, if a module cannot be cut as planned. Names the module.
        ClusterError: the cluster is too small.
        ModelError: weights are not finite.
    """

    def __init__(self, model: Model, plan: Plan, **options: Any) -> None:
        super().__init__(model, RuntimeOptions.of(options))
        self.references: Mapping[str, float] = {}
        ranks = self.check_plan(model, plan, self.options)
        self._inputs_of = batches_of(model, plan, self.options.autocast, ranks.builders.retries)
        self._start(plan, ranks)

    @classmethod
    def check_plan(cls, model: Model, plan: Plan, options: RuntimeOptions) -> RankSpecs:
        """Check that a model can run under a plan. Needs no cluster.

        Returns:
            Specifications of the processes.

        Raises:
            PlanError: the plan is for another model, a rank needs more memory than the plan's
                limit, cannot update its parameters as configured, or the model's sizes do not fit
                the plan's degrees.
            ProbeError: a module cannot be cut as planned.
        """
        if texts := differences(plan.graph, model.graph):
            raise PlanError(f"the plan does not match this model: {'; '.join(texts)}")
        split = {stage.module for stage in plan.stages if stage.cp > 1}
        check_head_dims(model, options, sorted(model.computed_attention | split))
        model.check_loss()
        check_loss(model, plan)
        check_fits(plan)
        check_groups(model, plan, options.features or ())
        if options.compile is not None:
            check_compiled(model, plan, options.kernels)
        check_optimizer(options.optimizer, plan, options.autocast is not None)
        return rank_specs(
            model, plan, optimizer=options.optimizer, autocast=options.autocast,
            exact_autocast=options.exact_autocast, device=options.device, threads=options.threads,
            kernels=options.kernels, quota_backend=options.quota_backend,
            timeout_s=options.timeout_s, nccl_timeout_s=options.nccl_timeout_s,
            features=options.features, seed=options.seed, compiled=options.compile is not None,
        )  # fmt: skip

    def _start(self, plan: Plan, ranks: RankSpecs) -> None:
        """Start the plan's processes. Raises PlanError, ClusterError or ModelError for host memory,
        cluster size or weights."""
        run = self.options
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
        try:
            if (astride := straddling(plan, self.group.placement.process_nodes)) is not None:
                run.placement.say(astride)
            if names := self.not_finite_tensors():
                suffix = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
                raise ModelError(
                    f"weights that are not finite: {', '.join(names[:MAX_NAMED])}{suffix}; "
                    "accepted: finite numbers. Check the file or the module that they come from"
                )
            if any(run.copies) or offloads(plan):
                needs = host_needs(ranks, self.model, run.optimizer, run.copies, run.device)
                check_hosts(needs, self.group.call("host_memory"))
        except BaseException:  # an interactive session would keep the ranks in the traceback
            self.shutdown()
            raise

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

    def reschedule(self, plan: Plan) -> None:
        """Continue under a plan with another schedule or recomputation, without restarting
        processes.

        Raises:
            PlanError: the plan assigns other layers to a rank.
        """
        def places(plan: Plan) -> dict[StageId, tuple]:
            return {
                s.id: (
                    s.layers, s.rank, s.degrees, s.sharding, s.ep, s.layer_options, s.quota,
                    s.microbatch_factor,
                )
                for s in plan.stages
            }

        if plan.graph != self.plan.graph or places(plan) != places(self.plan):
            raise PlanError(
                "stages of the new plan differ in layers or ranks from the running stages; "
                "start a new model with this plan"
            )
        self.plan = plan
        self._inputs_of.set_plan(plan)
        self._processes = Processes(plan)
        self._programs.clear()

    def set_references(self, references: Mapping[str, float]) -> None:
        """Set the reference log-probabilities of preference pairs by row id, instead of computing
        them in every step."""
        self.references = references

    def reloadable(self) -> frozenset[str]:
        return self.model.reloadable()

    @plain_torch()
    def prepare(self, batch: Any) -> Prepared:
        return self._inputs_of.prepare(batch)

    def sample_check(self) -> SampleCheck | None:
        """Return the check that data workers apply to every sample, which raises the errors of
        :meth:`execute`; None for a graph of modules, whose batches they do not load."""
        return self._inputs_of.sample_check()

    def submit(
        self,
        prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
        decode: Decode | None = None,
        *,
        schedule: str | None = None,
    ) -> PendingStep:
        """Start a step as in :meth:`raymm.runtime.parallel_module.ParallelModule.submit`.

        For preference pairs without :attr:`references`, first wait for the reference
        log-probabilities, computed without adapters.

        Args:
            decode: texts of a generation step; None for other steps.
        """
        if (loss := self.model.preference) is None or decode is not None:
            return self._submit(prepared, update, forward_only, keep, decode, schedule=schedule)
        meta = prepared[1]
        for number, microbatch in enumerate(meta):
            if microbatch.num_samples % 2:
                raise DataError(
                    f"microbatch {number} has {plural(microbatch.num_samples, 'row')}; accepted: "
                    "an even number, each chosen answer followed by its rejected answer"
                )
        references = self._kept_references(meta) if loss.asked_once else self.scores(prepared)
        pending = self._submit(
            prepared, update, forward_only, keep, references=references, schedule=schedule
        )
        pending.compared(lambda scores: loss.rewards(
            torch.tensor([score for index in range(len(meta)) for score in scores[index]]),
            torch.cat(references),
        ))
        return pending

    def _kept_references(self, meta: Sequence[MicrobatchMeta]) -> list[torch.Tensor]:
        ids = [microbatch.sample_ids for microbatch in meta]
        if unknown := [row for rows in ids for row in rows if row not in self.references]:
            raise DataError(
                f"the reference scores of row {unknown[0]!r} are missing; accepted: rows with an "
                "entry in references, computed by scores() before training"
            )
        return [torch.tensor([self.references[row] for row in rows]) for rows in ids]

    def scores(
        self, prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]]
    ) -> list[torch.Tensor]:
        """Wait for the log-probabilities of answers without adapters, (B,) fp32 per microbatch."""
        scores = self._submit(prepared, forward_only=True, references=()).scores()
        return [torch.tensor(scores[index]) for index in range(len(prepared[1]))]

    def _submit(
        self, prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False, forward_only: bool = False, keep: Any = None,
        decode: Decode | None = None, references: Sequence[torch.Tensor] | None = None,
        schedule: str | None = None,
    ) -> PendingStep:  # fmt: skip
        """Start a step. ``references``: (B,) per microbatch of preference pairs; empty to compute
        them."""
        self._mend()
        batches, (inputs_by_module, meta) = self._inputs_of, prepared
        batches.check(inputs_by_module, meta)
        samples, offsets = batches.samples(meta)
        process_inputs: list[list[tuple[StageId, int, Any]]] = [[] for _ in self._processes.all]
        for index, module_inputs in enumerate(inputs_by_module):
            of_samples = samples[index] if samples else None
            for stage, data in self._read(module_inputs, meta[index], index, references):
                if of_samples is None or stage_samples(self.plan, stage, of_samples):
                    data = batches.stage_inputs(stage, data, of_samples)
                    for number in self._processes.of_rank(stage.rank):
                        process_inputs[number].append((stage.id, index, data))
        pairs = references is not None
        step = StepMeta(
            step=self._step, seed=self.options.seed, batch=self._accumulated,
            label_tokens=sum(m.num_samples // 2 if pairs else m.label_tokens for m in meta),
            keys=tuple(
                self._layout_key(*described).decoding(decode)
                for described in zip_longest(meta, samples, offsets)
            ),
            sample_ids=() if batches.unnamed else tuple(tuple(m.sample_ids) for m in meta),
            training=not forward_only, offsets=offsets, decode=decode,
            reference=pairs and not references, kernels=dict(self.kernels),
            **batches.step_fields(meta),
        )
        ops = self._optimizer_ops() if update else ()
        pattern = tuple(tuple(sorted(microbatch.items)) for microbatch in meta)
        split = tuple(samples) if self.plan.splits_samples else ()
        featured = self._featured(meta)
        key = self._program(
            pattern, ops, forward_only, split, featured, schedule or self.plan.schedule
        )
        if not forward_only and self._counts_first(len(meta)):
            counting = self._program(pattern, (), True, split, featured, self.plan.schedule)
            step = self._counted(counting, step, process_inputs)
        handle = self.group.submit(key, step, process_inputs)
        named = () if batches.unnamed else meta
        noted = () if forward_only else self._note_batch(named, update)
        if update:
            self._step += 1
        skipped = partial(self._skipped_step, self._step, noted)
        return PendingStep(
            handle, step.label_tokens, keep, self._processes.all, skipped, self._choose_kernels
        )

    def _read(
        self, module_inputs: Mapping[str, Any], meta: MicrobatchMeta, index: int,
        references: Sequence[torch.Tensor] | None,
    ) -> Iterator[tuple[Stage, Any]]:
        """Yield the stages that read something of a microbatch, each with a dict of tensors or a
        Ray reference to one."""
        reader = self.model.text_module
        for name, data in module_inputs.items():
            module = reader if reader and name == TEXT else name
            skipped = self.model.separate_features and module in meta.featured
            for stage in self._readers(module, index, int(skipped)):
                yield stage, data
        for name, keys in meta.feature_keys.items():
            if name in self.options.features:
                for stage in self._readers(name, index):
                    yield stage, {KEYS: keys}
        if not reader:
            return
        rows = {name: torch.tensor(items, device="cpu") for name, items in meta.items.items()}
        for stage in self._readers(reader, index):
            yield stage, {"sample_index": rows}
        if references:
            for stage in self._readers(reader, index, -1):
                yield stage, {REFERENCE: references[index]}

    def _featured(self, meta: Sequence[MicrobatchMeta]) -> tuple[tuple[str, ...], ...]:
        """Return the modules by microbatch whose first stage cached features replace."""
        featured = tuple(tuple(m.featured) for m in meta)
        return featured if self.model.separate_features and any(featured) else ()

    def step_program(self, meta: Sequence[MicrobatchMeta], schedule: str) -> Program:
        """Return the checked program of a training step on microbatches with this metadata."""
        samples, _ = self._inputs_of.samples(meta)
        return self.program(
            [sorted(m.items) for m in meta],
            samples=samples if self.plan.splits_samples else (), featured=self._featured(meta),
            schedule=schedule,
        )

    def _layout_key(
        self, meta: MicrobatchMeta, samples: Samples | None,
        offsets: Mapping[str, Sequence[int]] | None,
    ) -> LayoutKey:
        key = layout_key(meta, self.model.rows_in_layout)
        if samples is None:
            return key
        # Messages hold parts of the items, whose sizes do not follow from the totals.
        offsets = offsets or {}
        sizes = [
            sum(rows_of(span, offsets[source.module]).size for span in ranges)
            for source, target in self.plan.stage_edges if source.module in offsets
            for ranges in [carried_samples(self.plan, source, [target], samples)]
        ]
        structure = hash((key.structure, samples.filled, samples.size))
        return key._replace(structure=structure, sizes=(*key.sizes, *sizes))

    def _counts_first(self, microbatches: int) -> bool:
        """Return True if a pass must count the routers' tokens before a training step. It is not
        needed for one stage on one process that gets all tokens in one microbatch."""
        if self.model.mixture is None or self.model.mixture.loss is None:
            return False
        stages = self.plan.module_stages(self.model.text_module)
        return microbatches * len(stages) * stages[0].cp * stages[0].fsdp > 1

    def _counted(self, key: str, meta: StepMeta, inputs: Sequence[Any]) -> StepMeta:
        """Run the counting pass and return the step metadata with its counts."""
        results = self.group.submit(key, meta._replace(counting=True), inputs).result()
        pairs = zip(self._processes.all, results, strict=True)
        counts = [r.router_counts for p, r in pairs if p.tp == 0 and r.router_counts is not None]
        return meta._replace(router_counts=tuple(map(sum, zip(*counts, strict=True))))

    def _choose_kernels(self, results: Sequence[StepResult]) -> None:
        """Choose the attention kernels that all ranks use from the next step on."""
        measured = [result.kernel_seconds for result in results]
        self.restore_kernels({**self.kernels, **agreed(measured, self.kernels)})

    def _skipped_step(
        self, step: int, batches: Sequence[Sequence[MicrobatchMeta]], loss: float | None,
        results: Sequence[StepResult],
    ) -> SkippedStep | None:  # fmt: skip
        reports = [result.not_finite for result in results]
        return skipped_step(
            step, loss, grad_norm(results), reports, self.plan.stage_edges,
            batches if all(batches) else (), self.model.text_module,
        )

    def _readers(self, module: str, microbatch: int, place: int = 0) -> list[Stage]:
        """Return the stages at a position of each replica that run a microbatch."""
        stages = [replica[place] for replica in self.plan.replicas(module)]
        return [stage for stage in stages if self.plan.runs(stage, microbatch)]

    @property
    def _placed(self) -> Plan:
        """Plan with the actual links between processes."""
        return on_nodes(self.plan, self.group.placement.process_nodes)

    def _scheduled(self, schedule: str) -> Plan:
        """Return the placed plan with a schedule."""
        plan = self._placed
        return plan if plan.schedule == schedule else replace(plan, schedule=schedule)

    def program(
        self, present: Sequence[Sequence[str]], update: bool = True,
        samples: Sequence[Samples] = (), featured: Sequence[Collection[str]] = (),
        schedule: str | None = None,
    ) -> Program:
        """Return the checked program of a step.

        Args:
            samples, featured: as in :func:`raymm.scheduler.schedule.lower.lower`.
            schedule: by default the plan's.
        """
        plan = self._scheduled(schedule or self.plan.schedule)
        program = lower(plan, present, samples=samples, featured=featured)
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
        samples: tuple[Samples, ...], featured: tuple[tuple[str, ...], ...], schedule: str,
    ) -> str:
        pattern = (present, ops, forward_only, samples, featured, schedule)
        key = self._programs.get(pattern)
        if key is None:
            plan = self._scheduled(schedule)
            program = lower(plan, present, None, forward_only, None, samples, featured)
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
                full = self.model.parameter_name(stage.module, name)
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
                full = self.model.parameter_name(stage.module, name)
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

def layout_key(meta: MicrobatchMeta, rows: bool) -> LayoutKey:
    """Return a key that determines the layout of all messages of a microbatch.

    Args:
        rows: True if the layout depends on the lengths of rows and the rows of items.
    """
    tensors = [
        (module, name, tuple(shape), meta.dtypes[module][name])
        for module, shapes in sorted(meta.shapes.items())
        for name, shape in sorted(shapes.items())
    ]
    structure: list[Any] = [(part, name, len(shape), kind) for part, name, shape, kind in tensors]
    sizes = [size for _, _, shape, _ in tensors for size in shape]
    of_rows: tuple[Any, ...] = ()
    if rows:
        items = tuple((name, tuple(of_items)) for name, of_items in sorted(meta.items.items()))
        lengths, longest = tuple(meta.lengths), max(meta.lengths, default=0)
        of_rows = items, lengths
        structure += [name for name, _ in items], all(length == longest for length in lengths)
        sizes += [*(len(of_items) for _, of_items in items), len(lengths), longest, sum(lengths)]
    exact = hash((tuple(tensors), tuple(sorted(meta.digests.items())), of_rows))
    return LayoutKey(exact, hash(repr(structure)), tuple(sizes))


_HEAD_DIMS = ("head_dim", "qk_head_dim", "v_head_dim", "attention_head_size")


def check_head_dims(
    model: Model, options: RuntimeOptions, modules: Iterable[str]
) -> None:
    """Reject attention heads that raymm's kernels cannot compute, unless another kernel may be
    used.

    Args:
        modules: names of modules whose attention raymm computes: with a mask, packed, or with
            tokens split over processes.

    Raises:
        ModelError: a head is too wide. Names module, attention layer and width.
    """
    if options.device != "cuda" or options.kernels == "auto":
        return
    for name in modules:
        for layer, head_dim in _head_dims(model.spec(name).source.skeleton()):
            if head_dim > LARGEST_HEAD_DIM:
                raise ModelError(
                    f"{name}: {layer} has head dimension {head_dim}; accepted on cuda: at most "
                    f"{LARGEST_HEAD_DIM}, or run.kernels: auto, which selects a suitable kernel"
                )


def _head_dims(module: nn.Module) -> Iterable[tuple[str, int]]:
    """Yield (name, head dimension) of attention modules that state it."""
    for layer, child in module.named_modules():
        if "attention" in type(child).__name__.lower():
            for name in _HEAD_DIMS:
                if isinstance(head_dim := getattr(child, name, None), int):
                    yield layer, head_dim


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
