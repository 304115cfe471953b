"""Check of the batches of a graph of modules before they are sent to a process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.modules.node import call
from raymm.actors.probe.example_inputs import in_words
from raymm.errors import USER_CODE_RAISES, DataError, ModelError
from raymm.model.batch_rules import BatchCheck, check_range, check_tensor, said
from raymm.model.encoder_trial import MAX_SIGNATURES, lookups, signature
from raymm.scheduler.graph.sample_ranges import Range

if TYPE_CHECKING:
    from raymm.model.module_dag import ModuleDag


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
