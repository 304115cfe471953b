"""Sections of a run with their time limits."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.gpu.record import Record

if TYPE_CHECKING:  # torch is imported by the processes that need it
    from benchmarks.gpu.device import Device

# Kinds of devices: a GPU, or a CPU that only tries the code.
KINDS = ("cuda", "cpu")


@dataclass(frozen=True)
class Section:
    """Group of measurements in separate processes.

    Attributes:
        name: name of the section, and of its module.
        seconds: time limit; unused time of earlier sections is added.
        shares: number of processes that share its parts.
        beside: True to run at the same time as the section before it: neither measures time.
        more: True for sections of the second run (``make gpu-more``).
    """

    name: str
    seconds: float
    shares: int = 1
    beside: bool = False
    more: bool = False

    def run(self, device: Device, record: Record, share: tuple[int, int]) -> None:
        """Run its parts in this process.

        Args:
            share: index of this process, and number of the section's processes.
        """
        module = import_module(f"benchmarks.gpu.{self.name}")
        if self.shares > 1:
            module.run(device, record, share)
        else:
            module.run(device, record)


# Sections that measure no time run first and at the same time: kernels are compiled on all cores,
# including those that FlexAttention will need. Attention uses all the remaining time.
SECTIONS = (
    Section("machine", 25),
    Section("correctness", 115, shares=7),
    Section("flex_kernels", 115, shares=4, beside=True),
    Section("nccl", 25),
    Section("stage_step", 60),
    Section("green_contexts", 45),
    Section("surfaces", 45),
    Section("recomputation", 35),
    Section("compiled_blocks", 45),
    Section("attention", 115),
    Section("recovery", 60, more=True),
    Section("full_step", 240, more=True),
    Section("host_copies", 90, more=True),
)
