"""Batches of a model: their checks, and the inputs that its modules read from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, singledispatch
from itertools import accumulate
from typing import Any

import ray
import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.modules.node import call
from raymm.actors.probe.example_inputs import in_words
from raymm.actors.probe.outputs import check_outputs
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.stages.labels import PAIR
from raymm.batch.check import PartsCheck
from raymm.data import MicrobatchMeta
from raymm.data.loading.builder import SampleCheck
from raymm.data.loading.in_memory import check_split, describe_microbatches, items_by_row
from raymm.data.loading.processed import describe_vlm
from raymm.errors import USER_CODE_RAISES, DataError, ModelError, NotRunError, ProbeError
from raymm.model.batch_rules import INDEX, BatchCheck, check_range, check_tensor, said
from raymm.model.encoder_trial import MAX_SIGNATURES, lookups, signature
from raymm.model.model import Model
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.model.vlm_batch import TEXT, TextShares, vlm_parts
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.program.stage_samples import Samples, filled_samples, stage_samples

# Inputs of each module by microbatch, and the metadata of the microbatches.
Prepared = tuple[list[dict[str, Any]], list[MicrobatchMeta]]
Retry = Callable[[Mapping[str, Any]], None]
Signature = frozenset[tuple[str, str, int]]
# Number of items of a microbatch in a trial of an encoder.
_ITEMS = 2


class Batches(ABC):
    """Converts the batches of a model to inputs of its modules under a plan.

    Attributes:
        unnamed: True if samples have no ids.
    """

    unnamed = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def set_plan(self, plan: Plan) -> None:
        """Continue under another plan with the same stages."""
        self.plan = plan

    @abstractmethod
    def prepare(self, batch: Any) -> Prepared:
        """Return the inputs of the modules by microbatch, and the metadata.

        Args:
            batch: one batch, which is split by rows into the plan's microbatches, or a list of
                microbatches.

        Raises:
            DataError: the batch does not fit the model. Names the entry.
        """

    def sample_check(self) -> SampleCheck | None:
        """Return the check that data workers apply to samples, which raises the errors of
        :meth:`prepare`; None if data workers do not load such batches."""
        return None

    def check(self, inputs: Sequence[Mapping[str, Any]], meta: Sequence[MicrobatchMeta]) -> None:
        """Raise a ``DataError`` if modules cannot take prepared inputs as they are split."""
        return

    def samples(
        self, meta: Sequence[MicrobatchMeta]
    ) -> tuple[tuple[Samples, ...], tuple[dict[str, tuple[int, ...]], ...]]:
        """Return the samples and item offsets of each microbatch, if the plan splits samples."""
        return (), ()

    def stage_inputs(self, stage: Stage, inputs: Any, samples: Samples | None) -> Any:
        """Return the inputs that one stage reads of its module's."""
        return inputs

    def step_fields(self, meta: Sequence[MicrobatchMeta]) -> dict[str, Any]:
        """Return further fields of the step's :class:`raymm.actors.executor.step_meta.StepMeta`."""
        return {}


@singledispatch
def batches_of(
    model: Model, plan: Plan, autocast: str | None, retries: Mapping[str, Retry]
) -> Batches:
    """Return the batches of a model under a plan.

    Args:
        autocast: autocast dtype of the ranks; None without autocast.
        retries: for each encoder that is cut or sharded, a function that raises a ``ProbeError`` if
            its stages do not work for some inputs.
    """
    raise TypeError(f"models of class {type(model).__name__} have no batches")


class PartsBatches(Batches):
    """Batches of a :class:`raymm.MultimodalModule`: text, and a dict of tensors by encoder."""

    def __init__(
        self, model: MultimodalModule, plan: Plan, autocast: str | None,
        retries: Mapping[str, Retry],
    ) -> None:
        super().__init__(plan)
        self._model = model
        self._check = PartsCheck(model, autocast)
        self._tried = TriedInputs(model)
        self._tried.retries.update(retries)

    def prepare(self, batch: Any) -> Prepared:
        microbatches = self._check.microbatches(batch, self.plan.num_microbatches)
        return describe_microbatches(
            [self._arranged(microbatch) for microbatch in microbatches], self._model.encoder_names
        )

    def _arranged(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        if self.plan.splits_samples:
            microbatch = items_by_row(microbatch)
        encoders = self._model.encoders
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

    def sample_check(self) -> SampleCheck:
        return self._check.of_samples()

    def check(self, inputs: Sequence[Mapping[str, Any]], meta: Sequence[MicrobatchMeta]) -> None:
        self._tried.check(inputs, meta)

    def samples(
        self, meta: Sequence[MicrobatchMeta]
    ) -> tuple[tuple[Samples, ...], tuple[dict[str, tuple[int, ...]], ...]]:
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


def _offsets(name: str, meta: MicrobatchMeta) -> tuple[int, ...]:
    """Return the first item of each sample, followed by the number of items."""
    rows = list(meta.items[name])
    if rows != sorted(rows):
        raise DataError(f"sample_index of {name!r} is {rows}; accepted: ascending row numbers")
    counts = [0] * meta.num_samples
    for row in rows:
        counts[row] += 1
    return (0, *accumulate(counts))


class VlmBatches(Batches):
    """Batches of a Hugging Face VLM: the output of its processor with ``labels``."""

    def __init__(self, model: PretrainedVlm, plan: Plan) -> None:
        super().__init__(plan)
        self._model = model
        text = plan.replicas(model.text_module)[0][0]
        self._check = replace(
            model.batch_check,
            shares=TextShares(
                text.cp, text.fsdp, model.packing, 1 if model.preference is None else PAIR
            ),
        )

    def prepare(self, batch: Any) -> Prepared:
        microbatches, meta, count = [], [], self.plan.num_microbatches
        for microbatch in self._check.microbatches(batch, count, count):
            inputs = vlm_parts(self._model.tower_inputs, microbatch)
            ids = [str(row) for row in range(len(microbatch["input_ids"]))]
            present = {name: [0] for name in inputs if name != TEXT}
            microbatches.append(inputs)
            meta.append(describe_vlm(microbatch, inputs, ids, present))
        return microbatches, meta

    def sample_check(self) -> SampleCheck:
        return self._check


class GraphBatches(Batches):
    """Batches of a :class:`raymm.ModuleDag`: entries with samples in dimension 0."""

    unnamed = True

    def __init__(self, dag: ModuleDag, plan: Plan) -> None:
        super().__init__(plan)
        self._dag = dag
        self._check = DagCheck(dag)

    def prepare(self, batch: Any) -> Prepared:
        count = self.plan.num_microbatches
        batches = self._check.microbatches(batch, count, count)
        inputs = [
            {
                name: {entry: microbatch[entry] for entry in node.reads.values()}
                for name, node in self._dag.nodes.items() if node.reads
            }
            for microbatch in batches
        ]
        return inputs, list(map(self._described, batches, inputs))

    def _described(
        self, batch: Mapping[str, torch.Tensor], inputs: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> MicrobatchMeta:
        size = self._dag.batch_size(batch)
        return MicrobatchMeta(
            num_samples=size, seq_len=0, tokens=0, lengths=(), label_tokens=0,
            items={name: [*range(size)] for name in self._dag.nodes},
            shapes={
                name: {key: tuple(value.shape) for key, value in entries.items()}
                for name, entries in inputs.items()
            },
            sample_ids=(),
            dtypes={
                name: {key: str(value.dtype) for key, value in entries.items()}
                for name, entries in inputs.items()
            },
            divisors=self._dag.divisors(batch),
        )

    def samples(
        self, meta: Sequence[MicrobatchMeta]
    ) -> tuple[tuple[Samples, ...], tuple[dict[str, tuple[int, ...]], ...]]:
        return tuple(Samples(microbatch.num_samples) for microbatch in meta), ()

    def stage_inputs(self, stage: Stage, inputs: Any, samples: Samples | None) -> Any:
        assert samples is not None  # a graph's microbatches are samples
        (first, *_) = stage_samples(self.plan, stage, samples)
        if first.size == samples.size:
            return inputs
        # Copies: views would bring the whole batch along.
        return {name: value[slice(*first)].clone() for name, value in inputs.items()}

    def step_fields(self, meta: Sequence[MicrobatchMeta]) -> dict[str, Any]:
        sizes = [microbatch.num_samples for microbatch in meta]
        noisy = any(node.noise for node in self._dag.nodes.values())
        return {
            "scales": self._dag.loss_factors([microbatch.divisors for microbatch in meta]),
            "first_samples": tuple(accumulate(sizes[:-1], initial=0)) if noisy else (),
            "sample_counts": tuple(sizes),
        }


batches_of.register(MultimodalModule, PartsBatches)
batches_of.register(PretrainedVlm, lambda model, plan, *_: VlmBatches(model, plan))
batches_of.register(ModuleDag, lambda model, plan, *_: GraphBatches(model, plan))


class DagCheck(BatchCheck):
    """Check of the batches of a graph that runs on actors.

    Modules run on the meta device with the first batch of every signature, as in
    :class:`raymm.model.encoder_trial.EncoderTrial`. Modules that read values cannot run there, so
    such errors only appear in the processes.
    """

    labelled = False

    def __init__(self, dag: ModuleDag) -> None:
        self._dag = dag
        self._ids: OrderedDict[tuple, dict[str, int]] = OrderedDict()

    @cached_property
    def _skeletons(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: node.skeleton(name) for name, node in self._dag.nodes.items()})

    def complete(self, microbatch: Any) -> dict[str, Any]:
        """Check the entries that modules read. Raises DataError if one cannot be sent, and
        ModelError if one is missing, or entries differ in the number of samples."""
        if not isinstance(microbatch, Mapping):
            raise DataError(
                f"the batch is {said(microbatch)}; accepted: a dict of tensors, or a list of them"
            )
        self._dag.batch_size(microbatch)
        for entry, value in self._read(microbatch).items():
            check_tensor(f"entry {entry!r}", value, "a tensor with samples in dimension 0")
        return dict(microbatch)

    def attempt(self, microbatch: Mapping[str, torch.Tensor]) -> None:
        size, read = self._dag.batch_size(microbatch), self._read(microbatch)
        key = signature(read, size)
        if key not in self._ids:
            self._ids[key] = self._try(read, size)
            if len(self._ids) > MAX_SIGNATURES:
                self._ids.popitem(last=False)
        for entry, stop in self._ids[key].items():
            check_range(f"entry {entry!r}", read[entry], stop, f"0 to {stop - 1}, the module's ids")

    def split(self, batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        batch, samples = self.complete(batch), self._dag.batch_size(batch)
        if samples % count:
            raise DataError(
                f"a batch of {samples} samples does not divide into {count} microbatches; "
                "accepted: a multiple of that number, or a list of microbatches"
            )
        size = samples // count
        # Copies: views would bring the whole batch along.
        return [
            {name: value[lo : lo + size].clone() for name, value in batch.items()}
            for lo in range(0, samples, size)
        ]

    def _read(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that modules read."""
        nodes = self._dag.nodes.values()
        return {entry: batch[entry] for node in nodes for entry in node.reads.values()}

    def _try(self, read: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
        """Run the modules; return the number of ids of each entry that is looked up in a table."""
        entries = {name: value.to("meta") for name, value in read.items()}
        outputs: dict[str, dict[str, torch.Tensor]] = {}
        try:
            skeletons = self._skeletons
        except USER_CODE_RAISES:  # cannot be tried here; the processes report errors
            return {}
        with lookups(skeletons, entries) as ids, torch.random.fork_rng(devices=[]):
            for name, spec in self._dag.specs().items():
                try:
                    with torch.no_grad():
                        outputs[name] = call(
                            spec, skeletons[name], entries, outputs, outputs, Range(0, size)
                        )
                except (NotImplementedError, ModelError):  # by the meta device, or by the model
                    break
                except USER_CODE_RAISES as error:
                    if "meta" in str(error).lower():  # the module reads values
                        break
                    raise DataError(
                        f"{name!r} does not accept the batch, {in_words(read)}{because(error)}; "
                        "accepted: entries that its forward accepts"
                    ) from error
        return ids


"""Name, dtype and number of dimensions of every input of an encoder."""


class TriedInputs:
    """Input signatures with which the encoders of a model have been tried.

    Encoders are first tried with their example inputs, or with guessed ones.

    Attributes:
        retries: for each split or sharded encoder, a function that raises a ``ProbeError`` if its
            stages do not work for some inputs.

    Raises:
        ProbeError: an encoder returns more than would be used.
    """

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model
        self.retries: dict[str, Retry] = {}
        self._tried: dict[str, set[Signature]] = {}
        for name, encoder in model.encoders.items():
            try:
                example = check_outputs(model.encoder_spec(name), encoder.example_inputs)
            except NotRunError:  # the first batch is tried instead
                self._tried[name] = set()
            else:
                self._tried[name] = {_signature_of(example)}

    def check(
        self, parts: Sequence[Mapping[str, Any]], meta: Sequence[MicrobatchMeta]
    ) -> None:
        """Try new input signatures; raise a ``DataError`` for inputs that the model cannot accept
        as it is split.

        Args:
            parts: inputs of each encoder by microbatch, or a Ray reference to them.
        """
        for inputs, microbatch in zip(parts, meta, strict=True):
            for name in microbatch.items:
                if name in microbatch.featured:  # cached features replace the encoder
                    continue
                signature = _signature(microbatch, name)
                if signature not in self._tried[name]:
                    self._try(name, signature, inputs[name])

    @plain_torch()
    def _try(self, name: str, signature: Signature, part: Any) -> None:
        example = _example(ray.get(part) if isinstance(part, ray.ObjectRef) else part)
        try:
            try:
                check_outputs(self._model.encoder_spec(name), example)
            except NotRunError:
                if name in self.retries:
                    raise
            if name in self.retries:
                self.retries[name](example)
        except ProbeError as error:
            tried = " or ".join(map(_in_words, self._tried[name])) or "nothing yet"
            raise DataError(
                f"{name!r} has {_in_words(signature)}, which differs from the inputs that its "
                f"encoder was tried with ({tried}), and fails: {error}"
            ) from error
        self._tried[name].add(signature)


def _signature(meta: MicrobatchMeta, name: str) -> Signature:
    dtypes = meta.dtypes[name]
    return frozenset(
        (key, dtypes[key], len(shape)) for key, shape in meta.shapes[name].items() if key != INDEX
    )


def _signature_of(inputs: Mapping[str, Any]) -> Signature:
    return frozenset(
        (name, str(value.dtype), value.dim()) for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    )  # fmt: skip


def _in_words(signature: Signature) -> str:
    return ", ".join(
        f"{name} ({dtype.removeprefix('torch.')}, {dims} dimensions)"
        for name, dtype, dims in sorted(signature)
    )


def _example(part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a few items in full precision; the precision of the ranks does not matter here."""
    tensors = {name: value for name, value in part.items() if name != INDEX}
    items = len(part[INDEX]) if INDEX in part else 0
    if all(len(value) == items for value in tensors.values()):
        tensors = {name: value[:_ITEMS] for name, value in tensors.items()}
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
