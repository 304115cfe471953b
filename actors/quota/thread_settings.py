"""Transfer of torch's thread-local settings to another thread.

Thread-local in torch 2.13 (found by changing each setting and reading it in another thread):
gradient and inference mode, autocast, default device. Also thread-local, but *not* transferred:
saved-tensor hooks, function modes and dispatch modes; enter them in the work itself. All other
settings (default dtype, deterministic algorithms, SDPA backends, matmul precision, anomaly
detection, number of threads) belong to the process.

Multithreaded backward is always disabled. Autograd has one thread per device for the backwards of
all modules: it would issue them in turn, and a backward that waits on the host would block the
others. When disabled, the thread that calls a backward issues it, with its stream current, node by
node on the stream of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ThreadSettings:
    """Settings of a thread: :meth:`capture` them in one thread and apply them in another.

    Attributes:
        autocast: (device type, enabled, dtype).
        default_device: default device of new tensors; None if not set.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None

    @classmethod
    def capture(cls) -> ThreadSettings:
        # get_default_device() does not distinguish "not set" from "cpu", and setting the device
        # adds a function mode around every call.
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
        """Apply the settings in the calling thread for the length of the block.

        Autocast does not cache cast weights: the cache belongs to the process, and a thread that
        leaves autocast would clear entries of another thread at an unpredictable time.
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
