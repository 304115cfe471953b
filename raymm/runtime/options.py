"""Options for running a model on Ray actors, common to all kinds of models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.host.memory import CopyOptions
from raymm.actors.modules.compiled_blocks import BLOCKS
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import ONLY_RANKS, PlacementOptions
from raymm.actors.quota import Backend
from raymm.actors.rank.rank_resources import RankResources
from raymm.kernels.choice.choice import check_kernels

PRECISIONS = ("auto", "fp32", "bf16")
DEVICES = ("cpu", "cuda")


def resolve_precision(precision: str, device: str) -> str:
    """Return ``"fp32"`` or ``"bf16"``; ``"auto"`` becomes bf16 on CUDA and fp32 on CPUs."""
    if precision != "auto":
        return precision
    return "bf16" if device == "cuda" else "fp32"


@dataclass(frozen=True)
class RuntimeOptions:
    """Keyword arguments of :class:`raymm.ParallelModel`.

    Attributes:
        precision: ``"fp32"``; ``"bf16"`` for autocast with fp32 parameters; or ``"auto"``, which
            becomes bf16 on CUDA and fp32 on CPUs.
        exact_autocast: with bf16 and sharding ``fsdp``, gather fp32 parameters and leave the casts
            to autocast, as without sharding, instead of gathering blocks in bf16 (including norms).
            Costs a copy of a stage's weights per microbatch in flight, and twice the traffic.
        kernels: attention kernels under a mask. ``"raymm"``; ``"raymm_unordered"``, which has five
            products per tile in the backward pass instead of seven and whose gradients differ in
            the last bits from run to run (CUDA only); or ``"auto"``, which measures raymm's
            kernel and those of torch once per class of shapes on each GPU and uses the fastest on
            all. Results then differ in the last bits from those of ``"raymm"``. CPUs have one
            kernel and measure nothing.
        compile: ``"blocks"`` to compile each block of encoders and language model with
            ``torch.compile`` (:mod:`raymm.actors.modules.compiled_blocks`); None for no
            compilation.
        device: ``"cpu"`` or ``"cuda"`` (one GPU per process).
        resources: Ray resources of each process; None for one CPU, and one GPU on CUDA.
        seed: seed of dropout and layer drop.
        timeout_s: seconds that a process may wait for another one, and that one instruction may
            take.
        nccl_timeout_s: seconds after which NCCL's watchdog ends a process with a stuck GPU
            operation; None for twice ``timeout_s``, after which the process that blocks the others
            is named. NCCL's flight recorder then writes the last operations, and the error names
            the files.
        quota_backend: creates, in each process, the backend for streams of modules with quotas;
            None for green contexts on CUDA, and a recording backend on CPUs.
        features: feature folder of each encoder with cached features. The plan gives its projector
            a separate stage.
        copies: copies of the training state in host memory, for which nodes must have room.

    Raises:
        ValueError: the precision, device, kernels or compilation are unknown.
        ClusterError: the resources do not have one GPU per process on CUDA.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: str = "auto"
    exact_autocast: bool = False
    kernels: str = "raymm"
    compile: str | None = None
    device: str = "cpu"
    resources: RankResources | None = None
    placement: PlacementOptions = ONLY_RANKS
    threads: int = 1
    seed: int = 0
    timeout_s: float = 300.0
    nccl_timeout_s: float | None = None
    quota_backend: Callable[[], Backend] | None = None
    features: Mapping[str, FeatureFolder] = field(default_factory=dict)
    copies: CopyOptions = CopyOptions()

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; accepted: {', '.join(PRECISIONS)}")
        check_kernels(self.kernels)
        if self.compile not in (None, BLOCKS):
            raise ValueError(f"compile is {self.compile!r}; accepted: {BLOCKS}, or null")
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; accepted: {', '.join(DEVICES)}")
        self.reserved.check_device(self.device)
        object.__setattr__(self, "precision", resolve_precision(self.precision, self.device))

    @classmethod
    def of(cls, options: Mapping[str, Any], without: Collection[str] = ()) -> RuntimeOptions:
        """Return options from keyword arguments.

        Args:
            options: options by name; ``optimizer=None`` selects the default.
            without: fields that the caller does not accept.

        Raises:
            TypeError: an option is unknown. Names it and the accepted ones.
        """
        accepted = [option.name for option in fields(cls) if option.name not in without]
        if unknown := [name for name in options if name not in accepted]:
            raise TypeError(
                f"{unknown[0]!r} is not an option of a parallel module; accepted: "
                f"{', '.join(accepted)}"
            )
        chosen = dict(options)
        chosen["optimizer"] = chosen.get("optimizer") or OptimizerConfig()
        return cls(**chosen)

    @property
    def autocast(self) -> str | None:
        """Name of the torch dtype for autocast; None without autocast."""
        return "bfloat16" if self.precision == "bf16" else None

    @property
    def reserved(self) -> RankResources:
        """Resources of each process, with the default applied."""
        return self.resources or RankResources(gpus=float(self.device == "cuda"))
