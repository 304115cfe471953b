"""What modules concurrently are held to: the same works, one after another in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from raymm.actors.quota import ModuleError, Output, StreamSet, Work, concurrent_modules
from raymm.actors.quota.thread_settings import ThreadSettings


def one_after_another(streams: StreamSet, works: Mapping[str, Work]) -> dict[str, Output]:
    """What :meth:`ConcurrentModules.run` does, in the calling thread, in the order of ``works``:
    the same numbers.

    Raises:
        ModuleError: at the first module whose work raises.
        ValueError: as :meth:`ConcurrentModules.run`.
    """
    concurrent_modules._check(streams, works)
    settings = ThreadSettings.capture()
    found = {}
    for module, work in works.items():
        issued = streams.backend.current().record()
        try:
            found[module] = concurrent_modules._perform(
                module, work, streams, issued, settings, contextlib.nullcontext()
            )
        except Exception as error:
            raise ModuleError(module, concurrent_modules._said(error)) from error
    return found
