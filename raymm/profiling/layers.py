"""Measurement of layer costs: one Ray actor per module, one after another."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.rank.module_profiler import ModuleProfiler, ModuleTimes, ProfileRequest
from raymm.actors.rank.rank_group import START_TIMEOUT_S
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.actors.sharding.parameter_shards import ShardPlan
from raymm.actors.weights.source import ModuleSource
from raymm.costs.layer_count import LayerCount, count_layers
from raymm.costs.load import Load
from raymm.errors import PlanError, ProbeError
from raymm.layout.stage_builders import stage_builders
from raymm.model.batch_rules import complete_microbatch
from raymm.model.multimodal import MultimodalModule, text_inputs
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.plan.stage import StageId

_IGNORE = -100
_FP32_BYTES = 4
_ELEMENT_BYTES = {"bf16": 2, "fp32": _FP32_BYTES}


# Maximum seconds for all repeats of one measurement.
MEASURE_TIMEOUT_S = 3600.0


class ProfilingActor:
    """Actor for the length of a ``with`` block. Yields a function that calls it.

    Raises:
        PlanError: from a call that fails or times out. Names the measured object.
    """

    def __init__(self, kind: type, resources: RankResources, arguments: tuple, what: str) -> None:
        self._make = ray.remote(kind).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus,
            resources=dict(resources.custom) or None, max_restarts=0,
        )
        self._arguments, self._what = arguments, what

    def __enter__(self) -> Callable[..., Any]:
        self._actor = self._make.remote(*self._arguments)
        return self._ask

    def _ask(self, method: str, *arguments: Any, timeout: float = MEASURE_TIMEOUT_S) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except GetTimeoutError:
            raise PlanError(f"profiling {self._what!r}: no answer within {timeout:g} s") from None
        except RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            raise PlanError(
                f"profiling {self._what!r} failed: {type(cause).__name__}: {cause}"
            ) from error
        except RayError as error:  # the actor died, for example out of memory
            raise PlanError(f"profiling {self._what!r} failed: {error}") from error

    def __exit__(self, *error: object) -> None:
        ray.kill(cast(ActorHandle, self._actor), no_restart=True)


@dataclass(frozen=True)
class LayerMeasurement:
    """Measurement of every layer of a model on the connected Ray cluster.

    Each complete module runs in a separate actor with a rank's resources; no other actor runs at
    the same time. Encoders run on the microbatch's items; with ``lengths``, also on half and on
    twice as many. The language model runs on the microbatch's text with random encoder outputs
    merged into it; with ``lengths``, also on random text.

    Args:
        microbatch: real microbatch, as :meth:`MultimodalModule.forward` takes it, with items for
            every encoder.
        lengths: additional tokens per sample for the language model.
        repeats: runs per measurement; the median counts.
        precision, device, resources, threads: as for the run
            (:class:`raymm.runtime.parallel_model.ParallelModel`).
    """

    model: MultimodalModule
    microbatch: Mapping[str, Any]
    lengths: Sequence[int] = ()
    repeats: int = 5
    precision: str = "fp32"
    device: str = "cpu"
    resources: RankResources = RankResources()
    threads: int = 1

    def run(self) -> ProfileTable:
        """Measure all modules.

        Raises:
            PlanError: an argument is out of range, or a module failed. Names it.
            ClusterError: the cluster lacks the resources of one rank.
        """
        _check(self.model, self.microbatch, self.lengths, self.repeats)
        check_capacity(1, self.resources)
        model, precision = self.model, self.precision
        microbatch = complete_microbatch(self.microbatch, model.encoder_names)
        plan = MultimodalParallelSpec(num_microbatches=1).plan(model)
        builders = stage_builders(model, plan).build
        reloadable = model.reloadable()
        autocast = "bfloat16" if precision == "bf16" else None
        modules: dict[str, tuple[Measurement, ...]] = {}
        default: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        description: dict[str, str] = {}
        for name in model.module_names:
            arguments = (
                builders[StageId(name, 0)], self.device, autocast, name in reloadable, self.threads
            )
            requests = list(_requests(name, model, microbatch, shapes, self.lengths))
            halves = _halves(model, name)
            description, times = _measure(
                name, arguments, requests, self.repeats, self.resources, halves
            )
            shapes[name] = times[0].output_shape
            default[name] = times[0].tokens
            modules[name] = _measurements(_counts(model, name), times, _ELEMENT_BYTES[precision])
        versions = {k: v for k, v in description.items() if k != "device"}
        return ProfileTable(
            modules, default, description["device"], precision,
            {**versions, "ray": ray.__version__},
            datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        )


def _check(
    model: MultimodalModule, microbatch: Mapping[str, Any], lengths: Sequence[int], repeats: int
) -> None:
    if type(repeats) is not int or repeats < 1:
        raise PlanError(f"repeats is {repeats!r}; it must be a whole number above 0")
    for name in model.encoder_names:
        if not microbatch.get(name):
            raise PlanError(f"the microbatch has no items for encoder {name!r}")
    config: Any = model.language_spec().source.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    for length in lengths:
        if type(length) is not int or length < 2:
            raise PlanError(f"lengths has {length!r}; each must be a whole number above 1")
        if isinstance(longest, int) and length > longest:
            raise PlanError(
                f"lengths has {length}; the language model takes at most {longest} positions"
            )


def _requests(
    name: str,
    model: MultimodalModule,
    microbatch: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    lengths: Sequence[int],
) -> Iterator[ProfileRequest]:
    """Yield requests for the real microbatch first, then for other sizes."""
    if name in model.encoders:
        items = microbatch[name]
        yield ProfileRequest(items, {})
        count = len(items["sample_index"])
        for size in sorted({max(1, count // 2), 2 * count} - {count}) if lengths else ():
            index = torch.arange(size) % count
            yield ProfileRequest({key: value[index] for key, value in items.items()}, {})
        return
    text = text_inputs(microbatch)
    present = {n: shapes[n] for n in model.encoder_names}
    yield ProfileRequest(text, present)
    labels = text["labels"]
    share = float((labels[:, 1:] != _IGNORE).sum()) / labels[:, 1:].numel()
    vocabulary = input_embeddings(model.language_spec().source.skeleton()).weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    for length in sorted(set(lengths)):
        ids = torch.randint(vocabulary, (labels.shape[0], length), generator=generator)
        labelled = max(1, round(share * (length - 1)))
        targets = ids.clone()
        targets[:, : length - labelled] = _IGNORE
        yield ProfileRequest(
            {"input_ids": ids, "labels": targets, "attention_mask": torch.ones_like(ids),
             "sample_index": {}}, {}, plain_text=True,
        )


def _halves(model: MultimodalModule, name: str) -> Mapping[str, ShardPlan] | None:
    """Return how two processes shard a module's parameters; None if they cannot."""
    shared = ParallelSpec(tp=2)
    if name in model.encoders:
        spec = MultimodalParallelSpec({name: shared}, num_microbatches=1)
    else:
        spec = MultimodalParallelSpec(language_model_spec=shared, num_microbatches=1)
    try:
        return stage_builders(model, spec.plan(model)).shard_specs[name].plans
    except (PlanError, ProbeError):
        return None


def _measure(
    name: str, arguments: tuple, requests: Sequence[ProfileRequest], repeats: int,
    resources: RankResources, halves: Mapping[str, ShardPlan] | None,
) -> tuple[dict[str, str], list[ModuleTimes]]:
    with ProfilingActor(ModuleProfiler, resources, arguments, name) as ask:
        description = ask("describe", timeout=START_TIMEOUT_S)
        times: list[ModuleTimes] = [ask("measure", request, repeats) for request in requests]
        if halves is None:
            return description, times
        ask("halve", halves)
        with_halves = []
        for module_times, request in zip(times, requests, strict=True):
            pairs = zip(module_times.layers, ask("layer_bytes", request), strict=True)
            layers = tuple(replace(layer, halved=half) for layer, half in pairs)
            with_halves.append(replace(module_times, layers=layers))
    return description, with_halves


def _counts(model: MultimodalModule, name: str) -> list[LayerCount]:
    """Return the counts of each layer for one token."""
    causal = name == model.text_module
    spec = model.language_spec() if causal else model.encoder_spec(name)
    result = [*count_layers(spec.source.skeleton(), Load(1, 1), causal)]
    projector: ModuleSource | None = getattr(spec, "projector", None)
    if projector is not None:
        result.append(sum(count_layers(projector.skeleton(), Load(1, 1)), LayerCount()))
    return result


def _measurements(
    counts: Sequence[LayerCount], times: Sequence[ModuleTimes], element_bytes: int
) -> tuple[Measurement, ...]:
    """Return measurements sorted by length. Of two with equal length, keep the first (real) one."""
    rows: dict[int, Measurement] = {}
    for times_of in times:
        layers = tuple(
            LayerCost(
                t.forward, t.backward_input, t.backward_weight, t.activation_bytes,
                _FP32_BYTES * count.parameters, t.output_bytes, _FP32_BYTES * count.replicated,
                round(times_of.tokens * count.key_value_elements * element_bytes),
                t.working_bytes, t.forward_bytes, t.data_bytes,
                _FP32_BYTES * count.base_parameters,
                quantised=count.quantised_share, options=t.options, halved=t.halved,
                expert_bytes=_FP32_BYTES * count.expert_parameters,
                few_bytes=_FP32_BYTES * count.few_parameters, few_heads=count.few_heads,
                tied_bytes=_FP32_BYTES * count.tied,
                exchange_bytes=round(times_of.tokens * count.exchange_elements * _FP32_BYTES),
            )
            for t, count in zip(times_of.layers, counts, strict=True)
        )
        rows.setdefault(times_of.tokens, Measurement(times_of.tokens, times_of.samples, layers))
    return tuple(rows[tokens] for tokens in sorted(rows))
