"""Reference for concurrent modules: the same work, one after another in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from raymm.actors.quota import Output, StreamSet, Work, concurrent_modules
from raymm.actors.quota.concurrent_modules import ThreadSettings
from raymm.errors import InternalError


def one_after_another(streams: StreamSet, works: Mapping[str, Work]) -> dict[str, Output]:
    """Run like :meth:`ConcurrentModules.run`, in the calling thread, in the order of ``works``.

    Raises:
        InternalError: at the first module whose work raises.
        ValueError: as in :meth:`ConcurrentModules.run`.
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
            said = concurrent_modules._said(error)
            raise InternalError(f"module {module!r} failed: {said}") from error
    return found
