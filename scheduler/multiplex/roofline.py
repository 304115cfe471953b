"""How long a module's work takes on a share of some GPUs, before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.scheduler.graph.strict_json import number, text, whole

# How smooth the roofline's ridge is by default: seconds = (compute^p + memory^p)^(1/p).
RIDGE = 4.0


@dataclass(frozen=True)
class ModuleWork:
    """What a module does in one iteration, in terms of one whole GPU.

    Attributes:
        name: the module.
        compute_seconds: its arithmetic with all multiprocessors of one GPU.
        memory_seconds: its traffic at the full memory bandwidth of one GPU.
        fixed_seconds: what neither more GPUs nor more multiprocessors make shorter (launches).
        reduce_seconds: all-reduce of its gradients between very many GPUs; 0 if it is frozen.
        parallel: GPUs beyond which each has too little work to use all its multiprocessors: at
            degree d only a share ``parallel / d`` of them helps.
        saturation: share of multiprocessors that reaches the full memory bandwidth.
        state_bytes: on every GPU, whatever the degree: parameters, gradients, optimizer.
        activation_bytes: of the whole batch.
        ridge: how smooth the roofline's ridge is, p in ``(compute^p + memory^p)^(1/p)``. Large:
            arithmetic and traffic overlap, as within one kernel. 1: they do not, as where kernels
            that do much arithmetic (products) and kernels that move data (norms, softmax,
            activation functions) take turns.

    Raises:
        PlanError: naming the field that does not fit.
    """

    name: str
    compute_seconds: float
    memory_seconds: float
    fixed_seconds: float = 0.0
    reduce_seconds: float = 0.0
    parallel: float = 64.0
    saturation: float = 0.4
    state_bytes: int = 0
    activation_bytes: int = 0
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        text(self.name, "work.name")
        for field in ("compute_seconds", "memory_seconds", "parallel"):
            number(getattr(self, field), f"{self.name}.{field}", 0.0, above=True)
        number(self.ridge, f"{self.name}.ridge", 1.0)
        for field in ("fixed_seconds", "reduce_seconds"):
            number(getattr(self, field), f"{self.name}.{field}", 0.0)
        number(self.saturation, f"{self.name}.saturation", 0.0, 1.0, above=True)
        whole(self.state_bytes, f"{self.name}.state_bytes")
        whole(self.activation_bytes, f"{self.name}.activation_bytes")

    def seconds(self, degree: int, share: float) -> float:
        """On so many GPUs, with a share of each one's multiprocessors."""
        compute = self.compute_seconds / degree / min(share, self.parallel / degree, 1.0)
        memory = self.memory_seconds / degree / min(share / self.saturation, 1.0)
        return (
            (compute**self.ridge + memory**self.ridge) ** (1 / self.ridge)
            + self.fixed_seconds + self.reduce_seconds * (degree - 1) / degree
        )

    def bandwidth(self, share: float) -> float:
        """Share of a GPU's bandwidth it uses on one GPU."""
        return min(1.0, self.memory_seconds / self.seconds(1, share))
