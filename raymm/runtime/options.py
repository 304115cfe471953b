"""How a model runs on Ray actors, whatever its plan: the options of a start, declared once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.host.memory import CopyOptions
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import ONLY_RANKS, PlacementOptions
from raymm.actors.quota import Backend
from raymm.actors.rank.rank_resources import RankResources
from raymm.kernels.choice.choice import check_kernels

PRECISIONS = ("auto", "fp32", "bf16")
DEVICES = ("cpu", "cuda")


def resolve_precision(precision: str, device: str) -> str:
    """Return the precision on a device, ``"fp32"`` or ``"bf16"``, where it may be ``"auto"``."""
    if precision != "auto":
        return precision
    return "bf16" if device == "cuda" else "fp32"


@dataclass(frozen=True)
class RuntimeOptions:
    """Keyword arguments of :class:`raymm.MultimodalParallelModule` and
    :class:`raymm.DagParallelModule`.

    Attributes:
        optimizer: AdamW, its schedule, and clipping.
        precision: ``"fp32"``; ``"bf16"`` for autocast with fp32 parameters; or ``"auto"``, which
            becomes bf16 on CUDA and fp32 on CPUs.
        exact_autocast: with bf16 and sharding ``fsdp``, gather fp32 parameters and leave them to
            autocast, as all others are, instead of gathering blocks in bf16 (norms, too). It
            costs a copy of a stage's weights per microbatch under way, and twice the traffic.
        kernels: what computes attention under a mask: ``"raymm"``; ``"raymm_unordered"``, which
            has five products per tile in the backward pass instead of seven and whose gradients
            differ in the last bits from run to run (CUDA only); or ``"auto"``: raymm's
            kernels or FlexAttention, whichever a process finds to be faster on its GPU, measured
            once per class of shapes. Results then differ in the last bits where the choice does.
            A CPU has one kernel, and measures nothing.
        device: ``"cpu"`` or ``"cuda"`` (one GPU per process).
        resources: what each process reserves in Ray; None: one CPU, and a GPU on CUDA.
        placement: what is reserved with the processes, and how long nodes may take to come.
        threads: intra-op threads per process.
        seed: of what modules draw (dropout, layer drop).
        timeout_s: seconds a process may wait for another, and one instruction may take.
        nccl_timeout_s: seconds after which NCCL's watchdog ends a process whose operation on a GPU
            does not end; None: twice ``timeout_s``, after which the one that is waited for is
            named. NCCL's flight recorder then writes what it did, and the error names the files.
        quota_backend: makes, in every process, the backend of the streams of modules with
            quotas; None: green contexts on CUDA, and a record of who ran when on a CPU.
        features: by encoder whose features are kept, where; the plan gives its projector a stage
            of its own.
        copies: of what trains in host memory, for which nodes must have room.

    Raises:
        ValueError: another precision or device, or other kernels.
        ClusterError: not one GPU for each process on CUDA.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: str = "auto"
    exact_autocast: bool = False
    kernels: str = "raymm"
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
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; accepted: {', '.join(DEVICES)}")
        self.reserved.check_device(self.device)
        object.__setattr__(self, "precision", resolve_precision(self.precision, self.device))

    @classmethod
    def of(cls, options: Mapping[str, Any], without: Collection[str] = ()) -> RuntimeOptions:
        """Of keyword arguments.

        Args:
            options: by name; ``optimizer=None`` is the default one.
            without: fields that the caller has no use for.

        Raises:
            TypeError: an option that is none; by name, with those that are accepted.
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
        """Name of the torch dtype of automatic mixed precision; None without."""
        return "bfloat16" if self.precision == "bf16" else None

    @property
    def reserved(self) -> RankResources:
        """What each process reserves, the default where nothing else is asked for."""
        return self.resources or RankResources(gpus=float(self.device == "cuda"))
