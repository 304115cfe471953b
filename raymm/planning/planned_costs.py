"""What a plan is judged by: costs of layers, links, the memory of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raymm.costs.analytic import analytic_profile
from raymm.costs.named_devices import CPU, device_called
from raymm.costs.profile_files import load_table
from raymm.costs.workload import (
    Workload,
    changed_tokens,
    check_tokens,
    microbatch_workload,
    token_workload,
)
from raymm.model.multimodal import LANGUAGE_MODEL, MultimodalModule
from raymm.scheduler.costs.devices import DeviceSpec, find_device
from raymm.scheduler.costs.layer_costs import CostProfile, ProfileError
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.plan.plan import PlanError
from raymm.scheduler.schedule.memory import GIB
from raymm.scheduler.schedule.network import Network

# Share of a device's memory that a plan may use; the rest is for CUDA, NCCL and fragmentation.
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Costs:
    """What a plan is judged by.

    Attributes:
        profile: costs of every layer on one microbatch, with the device's links.
        device: where; None if measured on one that raymm has no data of.
        ranks_per_node: processes that share a node.
        notes: remarks a person should see.
    """

    profile: CostProfile
    device: DeviceSpec | None = None
    ranks_per_node: int = 8
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device is not None and self.profile.links is None:
            profile = replace(self.profile, links=self.network.links)
            object.__setattr__(self, "profile", profile)

    @property
    def network(self) -> Network:
        """The device's links; messages take no time if it is not known."""
        if self.device is None:
            return Network()
        return Network(self.device.within_node, self.device.across_nodes, self.ranks_per_node)

    def memory_limit(self, gib: float | None) -> int | None:
        """Bytes a rank may use: as said, else most of a known device's memory; none on CPUs."""
        if gib is not None:
            if not gib > 0:
                raise PlanError(f"memory_gib is {gib}; it must be above 0")
            return int(gib * GIB)
        if self.device is None or self.device.name == CPU:
            return None
        return int(MEMORY_SHARE * self.device.memory_bytes)


def model_costs(
    model: MultimodalModule,
    *,
    device: str | None = None,
    profile: ProfileTable | str | Path | None = None,
    microbatch: Callable[[], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    tokens: Mapping[str, int] | None = None,
    samples: int = 1,
    text: int | None = None,
    dtype: str = "fp32",
    ranks_per_node: int = 8,
) -> Costs:
    """Costs of a model's layers: measured ones of a profile, else analytic ones of a device.

    Args:
        model: the description; its weights are not used.
        device: a name that :func:`raymm.scheduler.costs.devices.find_device` knows; by default the
            profile's, else ``"cpu"``.
        profile: a table that ``raymm profile`` made, or its file.
        microbatch: a real one (or a function that reads one) to take lengths from.
        tokens: per module, tokens per sample; where given, instead of the microbatch's.
        samples, text: samples per microbatch and their longest text, if there is no
            ``microbatch``.
        dtype: compute dtype, ``"fp32"`` or ``"bf16"``.
        ranks_per_node: ranks that share a node.

    Raises:
        DeviceError, ProfileError, LoadError: naming the field and what is accepted.
    """
    if ranks_per_node < 1:
        raise PlanError(f"ranks_per_node is {ranks_per_node}; it must be at least 1")
    tokens = dict(tokens or {})
    check_tokens(model, tokens)
    spec = None if device is None else find_device(device)
    if profile is not None:
        table = profile if isinstance(profile, ProfileTable) else load_table(profile)
        totals = {name: _total(table, name, each) for name, each in tokens.items()}
        found = table.at(totals)
        return Costs(found, spec or device_called(table.device), ranks_per_node)
    loads = _loads(model, microbatch, tokens, samples, text)
    notes = loads.notes
    if spec is None:
        spec = find_device(CPU)
        notes += ("no device is named: costs are those of one CPU core",)
    return Costs(
        analytic_profile(model, loads.by_module, spec, dtype), spec, ranks_per_node, notes
    )


def _loads(
    model: MultimodalModule, microbatch: Any, tokens: Mapping[str, int], samples: int,
    text: int | None,
) -> Workload:
    if microbatch is None or set(tokens) >= {*model.encoder_names, LANGUAGE_MODEL}:
        return token_workload(model, tokens, samples, text)
    real: Any = microbatch() if callable(microbatch) else microbatch
    return changed_tokens(microbatch_workload(model, real), tokens)


def _total(table: ProfileTable, name: str, each: int) -> int:
    """Tokens of a microbatch from tokens per sample, with as many samples as the default
    microbatch has."""
    if name not in table.modules:
        raise ProfileError(
            f"tokens name {name!r}; the profile's modules are {', '.join(table.modules)}"
        )
    default = table.default[name]
    row = next((r for r in table.modules[name] if r.tokens == default), table.modules[name][0])
    return each * row.samples
