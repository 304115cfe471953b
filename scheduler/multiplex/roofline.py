"""Analytic model of a module's time on shares of GPUs, for use without measurements."""

from __future__ import annotations

from dataclasses import dataclass

from raymm.scheduler.graph.strict_json import number, text, whole

# Default smoothness p of the roofline's ridge: seconds = (compute^p + memory^p)^(1/p).
RIDGE = 4.0


@dataclass(frozen=True)
class ModuleWork:
    """Work of a module in one iteration, relative to one whole GPU; raises ``PlanError`` naming an
    invalid field.

    Attributes:
        compute_seconds: arithmetic on all multiprocessors of one GPU.
        memory_seconds: memory traffic at the full bandwidth of one GPU.
        fixed_seconds: time that neither more GPUs nor more multiprocessors reduce (launches).
        reduce_seconds: all-reduce of its gradients between very many GPUs; 0 if frozen.
        parallel: number of GPUs beyond which each has too little work for all its multiprocessors:
            at degree d only a share ``parallel / d`` of them helps.
        saturation: share of multiprocessors that reaches the full memory bandwidth.
        state_bytes: parameters, gradients and optimizer state on every GPU, at any degree.
        ridge: smoothness p of ``(compute^p + memory^p)^(1/p)``. Large values mean that arithmetic
            and traffic overlap, as within one kernel. 1 means no overlap, as where compute-bound
            kernels (products) alternate with memory-bound ones (norms, softmax, activation
            functions).
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
        """Return the seconds on ``degree`` GPUs, with a share of each one's multiprocessors."""
        compute = self.compute_seconds / degree / min(share, self.parallel / degree, 1.0)
        memory = self.memory_seconds / degree / min(share / self.saturation, 1.0)
        return (
            (compute**self.ridge + memory**self.ridge) ** (1 / self.ridge)
            + self.fixed_seconds + self.reduce_seconds * (degree - 1) / degree
        )

    def bandwidth(self, share: float) -> float:
        """Return the share of a GPU's bandwidth that the module uses on one GPU."""
        return min(1.0, self.memory_seconds / self.seconds(1, share))
