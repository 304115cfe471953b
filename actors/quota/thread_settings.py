"""Settings of torch that each thread has its own of, carried into another thread.

Thread-local in torch 2.13 (found by changing each and looking from another thread): gradient
and inference mode, autocast, default device. Also thread-local, and *not* carried: saved-tensor
hooks, function and dispatch modes; enter them in the work itself. Multithreaded backward is always
off: autograd has one thread per device for the backwards of all modules, which would be issued by
turns, and one that waits on the host would hold up the others. Without it a backward is issued by
the thread that calls it, with its stream current, node by node on the stream of the forward.
All else (default dtype, deterministic algorithms, SDPA backends, matmul precision, anomaly
detection, number of threads) is the process's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ThreadSettings:
    """The calling thread's settings; :meth:`capture` them in one thread and use them in
    another.

    Attributes:
        grad, inference: whether they are on.
        autocast: (enabled, dtype) by device type.
        default_device: where tensors are made by default, or None if that was not set.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None

    @classmethod
    def capture(cls) -> ThreadSettings:
        """Those of the calling thread."""
        # get_default_device() cannot tell "not set" from "cpu", and setting it costs a
        # function mode around every call.
        device = torch.get_default_device()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in AUTOCAST_DEVICES
            ),
            default_device=None if device == torch.device("cpu") else device,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use them in the calling thread.

        Autocast does not keep cast weights: the cache is the process's, and one thread leaving
        autocast would drop what another has in it, at a time that depends on timing.
        """
        with ExitStack() as stack:
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            stack.callback(torch.set_autocast_cache_enabled, cached)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
