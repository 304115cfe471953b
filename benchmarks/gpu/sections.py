"""The sections of a run: what each asks, and how long it may."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.gpu.record import Record

if TYPE_CHECKING:  # torch is imported by the processes that need it
    from benchmarks.gpu.device import Device

# Of devices: a GPU, or a CPU that only tries the code.
KINDS = ("cuda", "cpu")


@dataclass(frozen=True)
class Section:
    """A question to the machine, in processes of its own.

    Attributes:
        name: of the section, and of its module.
        seconds: that it may take; what sections before it have left over comes on top.
        shares: processes that share its parts.
        beside: runs at the same time as the section before it: neither measures time.
        more: is of the second run (``make gpu-more``).
    """

    name: str
    seconds: float
    shares: int = 1
    beside: bool = False
    more: bool = False

    def run(self, device: Device, record: Record, share: tuple[int, int]) -> None:
        """Run its parts in this process.

        Args:
            device: where.
            record: takes the parts.
            share: which of the processes that share them this is, and how many there are.
        """
        module = import_module(f"benchmarks.gpu.{self.name}")
        if self.shares > 1:
            module.run(device, record, share)
        else:
            module.run(device, record)


# What measures no time comes first and at the same time: kernels are compiled on all cores, also
# those that FlexAttention will need. Attention takes all the time that is left over.
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
