"""Hugging Face VLM on Ray actors: its towers and its language model in pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.features.kept_features import KEYS
from raymm.actors.modules.message import Decode
from raymm.actors.probe.plain_torch import plain_torch
from raymm.data import MicrobatchMeta
from raymm.data.loading.builder import SampleCheck
from raymm.data.loading.processed import describe_whole
from raymm.errors import DataError, PlanError
from raymm.layout.plan_check import differences
from raymm.layout.rank_specs import RankSpecs
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.ragged import split_rows
from raymm.model.whole_batch import TEXT, TextShares, text_parts
from raymm.model.whole_model import WholeModel
from raymm.plural import plural
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.pending_step import PendingStep
from raymm.runtime.plan_module import PlannedModule
from raymm.runtime.specs import ParallelSpec, plan_of
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Program

Batch = Mapping[str, torch.Tensor]


def whole_plan(
    model: WholeModel, specs: Mapping[str, ParallelSpec] | None = None, num_microbatches: int = 1,
    schedule: str = "1f1b", recompute: bool = False,
) -> Plan:  # fmt: skip
    """Return a plan for a Hugging Face VLM.

    Args:
        specs: layouts by tower, and of the language model as ``"llm"``; by default one separate
            rank each.

    Raises:
        PlanError: the specs do not fit the model.
    """
    names = (*model.tower_names, LANGUAGE_MODEL)
    layouts = dict(specs or {})
    if unknown := sorted(layouts.keys() - set(names)):
        raise PlanError(f"specs name {unknown}; the model's modules are {', '.join(names)}")
    every = {name: layouts.get(name, ParallelSpec()) for name in names}
    return plan_of(model.graph, every, num_microbatches, schedule, recompute)


class WholeParallelModule(PlannedModule):
    """:class:`raymm.model.whole_model.WholeModel` on the actors of a plan (see :func:`whole_plan`).

    A step's loss is the sum of cross entropies over its label tokens, divided by their number.

    Args:
        model: model description. Ranks read their weights from files.
        **options: fields of :class:`raymm.runtime.options.RuntimeOptions`.

    Raises:
        PlanError: the plan is for another model, or splits a module in a way that it does not
            support. Other errors are those of :class:`raymm.MultimodalParallelModule`.
    """

    model: WholeModel

    def __init__(self, model: WholeModel, plan: Plan, **options: Any) -> None:
        super().__init__(model, RuntimeOptions.of(options))
        self._start(plan)
        text = plan.replicas(LANGUAGE_MODEL)[0][0]
        self._check = replace(
            model.batch_check, shares=TextShares(text.cp, text.fsdp, model.packing)
        )

    @classmethod
    def check_plan(cls, model: WholeModel, plan: Plan, options: RuntimeOptions) -> RankSpecs:
        if texts := differences(plan.graph, model.graph):
            raise PlanError(f"the plan does not match this model: {'; '.join(texts)}")
        return super().check_plan(model, plan, options)

    def _full_name(self, stage: StageId, name: str) -> str:
        return name.removeprefix("module.")

    @property
    def mixture(self) -> Mixture | None:
        return self.model.mixture

    def reloadable(self) -> frozenset[str]:
        return frozenset(self.model.module_names) - self.model.changing

    def sample_check(self) -> SampleCheck:
        """Return the check that data workers apply to every microbatch. It raises the errors of
        :meth:`execute`."""
        return self._check

    @plain_torch()
    def prepare(
        self, batch: Batch | Sequence[Batch]
    ) -> tuple[list[dict[str, dict[str, torch.Tensor]]], list[MicrobatchMeta]]:
        """Return the microbatches of a step, at most as many as the plan has, as parts per module,
        and their metadata.

        Args:
            batch: output of the model's processor with ``labels``, which is split by rows into
                microbatches, or a list of microbatches. The split uses ``sample_index``, the row of
                every item by tower, (N,) int64; it is required unless there is one item per row.

        Raises:
            DataError: the batch does not fit the model.
        """
        batches = self._split(batch) if isinstance(batch, Mapping) else list(batch)
        if not 1 <= len(batches) <= self.plan.num_microbatches:
            raise DataError(
                f"a step has {plural(len(batches), 'microbatch', 'es')}; accepted: 1 to "
                f"{self.plan.num_microbatches}, as in the plan"
            )
        microbatches, meta = [], []
        for microbatch in batches:
            self._check(microbatch)
            inputs = text_parts(self.model.tower_inputs, microbatch)
            ids = [str(row) for row in range(len(microbatch["input_ids"]))]
            present = {name: [0] for name in inputs if name != TEXT}
            microbatches.append(inputs)
            meta.append(describe_whole(microbatch, inputs, ids, present))
        if not sum(metadata.label_tokens for metadata in meta):
            raise DataError("labels of the step are all -100; accepted: at least one label")
        return microbatches, meta

    def _split(self, batch: Mapping[str, Any]) -> list[Batch]:
        index = batch.get("sample_index", {})
        entries = {name: value for name, value in batch.items() if name != "sample_index"}
        self.model.check(entries)
        towers = {t.name: tuple(e for _, e in t.arguments) for t in self.model.towers}
        return [*split_rows(entries, towers, index, self.plan.num_microbatches)]

    def submit(
        self, prepared: tuple[Sequence[Mapping[str, Any]], Sequence[MicrobatchMeta]],
        update: bool = False, forward_only: bool = False, keep: Any = None,
        decode: Decode | None = None,
    ) -> PendingStep:  # fmt: skip
        """Start a step as in :meth:`raymm.runtime.parallel_module.ParallelModule.submit`.

        Args:
            decode: texts of a generation step; None for other steps.
        """
        microbatches, meta = prepared
        inputs = [
            (stage.id, index, tensors)
            for index, module_inputs in enumerate(microbatches)
            for name, tensors in module_inputs.items()
            for stage in self._readers(LANGUAGE_MODEL if name == TEXT else name, index)
        ]
        inputs += [
            (stage.id, index, {KEYS: keys})
            for index, metadata in enumerate(meta)
            for name, keys in metadata.feature_keys.items() if name in self.options.features
            for stage in self._readers(name, index)
        ]
        step = StepMeta(
            step=self._step, label_tokens=sum(metadata.label_tokens for metadata in meta),
            keys=tuple(
                _layout_key(metadata, self.model.packing).decoding(decode) for metadata in meta
            ),
            sample_ids=tuple(tuple(metadata.sample_ids) for metadata in meta),
            training=not forward_only, decode=decode,
        )
        present = [metadata.items for metadata in meta]
        return self._submitted(present, inputs, step, meta, update, keep)

    def step_program(self, meta: Sequence[MicrobatchMeta]) -> Program:
        """Return the checked program of a training step on microbatches with this metadata."""
        return self.program([sorted(metadata.items) for metadata in meta])


def _layout_key(meta: MicrobatchMeta, packing: bool) -> LayoutKey:
    """Return a key that determines the shapes of all messages: shapes, per-item numbers (grids,
    sizes), and for packed rows their lengths."""
    tensors = [
        (module, name, tuple(shape), meta.dtypes[module][name])
        for module, shapes in sorted(meta.shapes.items())
        for name, shape in sorted(shapes.items())
    ]
    structure = [(module, name, len(shape), dtype) for module, name, shape, dtype in tensors]
    sizes = [size for _, _, shape, _ in tensors for size in shape]
    digests = sorted(meta.digests.items())
    lengths = tuple(meta.lengths) if packing else ()
    sizes += [sum(lengths)] * packing
    return LayoutKey(hash(repr((tensors, digests, lengths))), hash(repr(structure)), tuple(sizes))
