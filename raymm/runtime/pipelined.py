"""Multimodal model on Ray actors: start, steps and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import nn

from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.features.kept_features import KEYS
from raymm.actors.modules.message import Decode
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.stages.language import REFERENCE
from raymm.batch.check import BatchCheck
from raymm.batch.tried_inputs import TriedInputs, check_loss
from raymm.data import MicrobatchMeta
from raymm.data.loading.builder import SampleCheck
from raymm.data.loading.in_memory import check_split, describe_microbatches, items_by_row
from raymm.errors import DataError, ModelError
from raymm.kernels.flash.gpu.launch_configs import LARGEST_HEAD_DIM
from raymm.layout.preference_check import check_preference
from raymm.layout.rank_specs import RankSpecs
from raymm.layout.stage_builders import reloadable_modules
from raymm.model.module_kind import LANGUAGE_MODEL, ModuleKind, module_kind
from raymm.model.multimodal import MultimodalModule
from raymm.plural import plural
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.pending_step import PendingStep
from raymm.runtime.plan_module import PlannedModule
from raymm.scheduler.graph.sample_ranges import rows_of
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.stage_samples import (
    Samples,
    carried_samples,
    filled_samples,
    stage_samples,
)


class MultimodalParallelModule(PlannedModule):
    """:class:`MultimodalModule` on Ray actors (made by ``MultimodalParallelSpec.apply``).

    Connects to an existing Ray cluster, or starts one on this machine. If the plan splits
    microbatches by samples (:func:`raymm.plan_of_mapping` may do so), the items of a sample stay
    with it, and an encoder does not run for samples without items.

    A step loop::

        outputs = parallel.execute(batch)
        optimizer.step()

    Args:
        model: model description. Live weights are sent to the ranks that own them.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Attributes:
        references: reference log-probabilities of preference pairs by row id, from :meth:`scores`
            before training.

    Raises:
        TypeError, ValueError: an option is unknown or invalid.
        PlanError: before any actor starts, if a rank needs more memory than the plan's limit, or
            has quotas that its device does not support.
        ProbeError: before any actor starts, if a module cannot be cut as planned. Names the module.
        ClusterError: the cluster is too small.
        ModelError: weights are not finite.
    """

    model: MultimodalModule

    def __init__(self, model: MultimodalModule, plan: Plan, **options: Any) -> None:
        super().__init__(model, RuntimeOptions.of(options))
        self._encoders = model.encoder_names
        self._check = BatchCheck(model, self.options.autocast)
        self._tried = TriedInputs(model)
        self.references: Mapping[str, float] = {}
        self._tried.retries.update(self._start(plan).builders.retries)

    def set_references(self, references: Mapping[str, float]) -> None:
        """Set the reference log-probabilities of preference pairs by row id, instead of computing
        them in every step."""
        self.references = references

    @classmethod
    def check_plan(
        cls, model: MultimodalModule, plan: Plan, options: RuntimeOptions
    ) -> RankSpecs:
        masked = model.mask is not None or model.packing
        check_head_dims(model, options, [LANGUAGE_MODEL] if masked else [])
        check_head_dims(model, options, {s.module for s in plan.stages if s.cp > 1})
        check_loss(model)
        check_preference(model, plan)
        return super().check_plan(model, plan, options)

    @property
    def mixture(self) -> Mixture | None:
        return self.model.mixture

    def reloadable(self) -> frozenset[str]:
        """Return the modules whose frozen weights checkpoints need not contain."""
        return reloadable_modules(self.model)

    @plain_torch()
    def prepare(
        self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[MicrobatchMeta]]:
        """Return the microbatches as parts per module, and their metadata.

        Raises:
            DataError: see :meth:`execute`.
        """
        microbatches = self._check.microbatches(batch, self.microbatches)
        arranged = [self._arranged(microbatch) for microbatch in microbatches]
        return describe_microbatches(arranged, self._encoders)

    def sample_check(self) -> SampleCheck:
        """Return the check that data workers apply to every sample. It raises the errors of
        :meth:`execute`."""
        return self._check.of_samples()

    def _full_name(self, stage: StageId, name: str) -> str:
        return model_name(stage, name)

    def _arranged(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        if self.plan.splits_samples:
            microbatch = items_by_row(microbatch)
        encoders = self.model.encoders
        for stage in self.plan.stages:
            name, purpose = stage.module, None
            if stage.split == SAMPLES:
                purpose = "to deal them out by samples"
            # Only the rank sees the output of a preprocess callback.
            elif stage.sharding == "fsdp" and name in encoders and (
                not encoders[name].preprocess_callback
            ):
                purpose = "with sharding 'fsdp'"
            if purpose is not None and name in encoders and name in microbatch:
                check_split(name, microbatch[name], purpose)
        return microbatch

    def submit(
        self,
        prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
        decode: Decode | None = None,
    ) -> PendingStep:
        """Start a step as in :meth:`raymm.runtime.parallel_module.ParallelModule.submit`.

        For preference pairs without :attr:`references`, first wait for the reference
        log-probabilities, computed without adapters.

        Args:
            decode: texts of a generation step; None for other steps.
        """
        if self.model.preference is None or decode is not None:
            return self._submit(prepared, update, forward_only, keep, decode)
        for number, microbatch in enumerate(prepared[1]):
            if microbatch.num_samples % 2:
                raise DataError(
                    f"microbatch {number} has {plural(microbatch.num_samples, 'row')}; accepted: "
                    "an "
                    "even number, each chosen answer followed by its rejected answer"
                )
        loss, meta = self.model.preference, prepared[1]
        if loss.asked_once:
            references = self._kept_references(meta)
        else:
            references = self.scores(prepared)
        pending = self._submit(prepared, update, forward_only, keep, references=references)
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
    ) -> PendingStep:  # fmt: skip
        """Start a step. ``references``: (B,) per microbatch of preference pairs; empty to compute
        them."""
        inputs_by_module, meta = prepared
        self._tried.check(inputs_by_module, meta)
        samples, offsets = self._samples(meta)
        inputs: list[tuple[StageId, int, Any]] = []
        for index, (tensors, microbatch) in enumerate(zip(inputs_by_module, meta, strict=True)):
            rows = {name: torch.tensor(i, device="cpu") for name, i in microbatch.items.items()}
            read = [
                (LANGUAGE_MODEL if name == "text" else name, data) for name, data in tensors.items()
            ]
            inputs += [
                (stage.id, index, data)
                for module, data in (*read, (LANGUAGE_MODEL, {"sample_index": rows}))
                for stage in self._readers(module, index, int(module in microbatch.featured))
                if not samples or stage_samples(self.plan, stage, samples[index])
            ]
            inputs += [
                (stage.id, index, {KEYS: keys})
                for name, keys in microbatch.feature_keys.items()
                for stage in self._readers(name, index)
            ]
            if references:
                inputs += [
                    (stage.id, index, {REFERENCE: references[index]})
                    for stage in self._readers(LANGUAGE_MODEL, index, -1)
                ]
        pairs = references is not None
        step = StepMeta(
            step=self._step,
            label_tokens=sum(m.num_samples // 2 if pairs else m.label_tokens for m in meta),
            keys=tuple(
                key.decoding(decode) for key in
                map(self._layout_key, meta, samples or repeat(None), offsets or repeat({}))
            ),
            sample_ids=tuple(tuple(microbatch.sample_ids) for microbatch in meta),
            training=not forward_only, offsets=offsets, decode=decode,
            reference=pairs and not references,
        )
        present = [microbatch.items for microbatch in meta]
        featured = [microbatch.featured for microbatch in meta]
        return self._submitted(present, inputs, step, meta, update, keep, samples, featured)

    def step_program(self, meta: Sequence[MicrobatchMeta]) -> Program:
        """Return the checked program of a training step on microbatches with this metadata."""
        return self.program(
            [sorted(m.items) for m in meta], samples=self._samples(meta)[0],
            featured=[m.featured for m in meta],
        )

    def _samples(
        self, meta: Sequence[MicrobatchMeta]
    ) -> tuple[tuple[Samples, ...], tuple[dict[str, tuple[int, ...]], ...]]:
        """Return samples and item offsets of each microbatch, if the plan splits samples."""
        if not self.plan.splits_samples:
            return (), ()
        offsets = tuple(
            {name: _offsets(name, microbatch) for name in microbatch.items} for microbatch in meta
        )
        samples = tuple(
            filled_samples(self.plan, microbatch.num_samples, module_offsets)
            for microbatch, module_offsets in zip(meta, offsets, strict=True)
        )
        return samples, offsets

    def _layout_key(
        self, meta: MicrobatchMeta, samples: Samples | None, offsets: Mapping[str, Sequence[int]]
    ) -> LayoutKey:
        key = _layout_key(meta)
        if samples is None:
            return key
        # Messages hold parts of the items, whose sizes do not follow from the totals.
        sizes = [
            sum(rows_of(span, offsets[source.module]).size for span in ranges)
            for source, target in self.plan.stage_edges if source.module in offsets
            for ranges in [carried_samples(self.plan, source, [target], samples)]
        ]
        structure = hash((key.structure, samples.filled, samples.size))
        return key._replace(structure=structure, sizes=(*key.sizes, *sizes))


def _offsets(name: str, meta: MicrobatchMeta) -> tuple[int, ...]:
    """Return the first item of each sample, followed by the number of items."""
    rows = list(meta.items[name])
    if rows != sorted(rows):
        raise DataError(f"sample_index of {name!r} is {rows}; accepted: ascending row numbers")
    counts = [0] * meta.num_samples
    for row in rows:
        counts[row] += 1
    return (0, *accumulate(counts))


def model_name(stage: StageId, name: str) -> str:
    """Return a parameter's name in the model, such as ``"vision_encoder.module.x"`` for
    ``"module.x"`` of stage ``vision.0``."""
    is_language = module_kind(stage.module) is ModuleKind.LANGUAGE_MODEL
    return f"{'language_model' if is_language else stage.module + '_encoder'}.{name}"


def _layout_key(meta: MicrobatchMeta) -> LayoutKey:
    """Return a key that determines the layout of all messages of a microbatch."""
    tensors = [
        (module, name, tuple(shape), meta.dtypes[module][name])
        for module, shapes in sorted(meta.shapes.items())
        for name, shape in sorted(shapes.items())
    ]
    items = tuple((name, tuple(rows)) for name, rows in sorted(meta.items.items()))
    lengths = tuple(meta.lengths)
    longest = max(lengths, default=0)
    is_unpadded = all(length == longest for length in lengths)
    structure = (
        [(module, name, len(shape), dtype) for module, name, shape, dtype in tensors],
        [name for name, _ in items], is_unpadded,
    )
    sizes = [
        *(size for _, _, shape, _ in tensors for size in shape),
        *(len(rows) for _, rows in items), len(lengths), longest, sum(lengths),
    ]
    return LayoutKey(hash((tuple(tensors), items, lengths)), hash(repr(structure)), tuple(sizes))


_HEAD_DIMS = ("head_dim", "qk_head_dim", "v_head_dim", "attention_head_size")


def check_head_dims(
    model: MultimodalModule, options: RuntimeOptions, modules: Iterable[str]
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
