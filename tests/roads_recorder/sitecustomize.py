"""Record of the functions of the packages that a process calls, for :mod:`tests.house_roads`.

Python imports this module when a process starts with its folder on ``PYTHONPATH``. The log gets a
line ``time process file function`` per call, at most one line per function and 20 ms. Ray calls
actors' methods on threads that it creates outside Python, so each call enables recording.
"""

import functools
import inspect
import os
import sys
import threading
import time

RESOLUTION_S = 0.02


def _record(log: str, folders: tuple[str, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    names: dict[object, str] = {}
    latest: dict[object, int] = {}

    def profile(frame, event, argument):  # noqa: ANN001, ANN202 (called by the interpreter)
        if event != "call":
            return
        code = frame.f_code
        name = names.get(code)
        if name is None:
            if code.co_qualname == "FunctionActorManager.__init__":
                record_methods(type(frame.f_locals["self"]))
            path = os.path.realpath(code.co_filename)
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # not a module or a class body
            known = path.startswith(folders) and is_function
            name = names[code] = f"{path} {code.co_qualname}" if known else ""
        if name and latest.get(code) != (now := int(time.monotonic() / RESOLUTION_S)):
            latest[code] = now
            os.write(file, f"{now * RESOLUTION_S} {os.getpid()} {name}\n".encode())

    def record_methods(manager: type) -> None:
        make_executor = manager._make_actor_method_executor

        def make(self, name, method):  # noqa: ANN001, ANN202 (called by Ray)
            @functools.wraps(method)
            def recorded(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
                sys.setprofile(profile)
                return method(*args, **kwargs)

            awaited = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
            return make_executor(self, name, method if awaited else recorded)

        manager._make_actor_method_executor = make

    threading.setprofile(profile)
    sys.setprofile(profile)


if (_log := os.environ.get("RAYMM_ROADS_LOG")) is not None:
    _record(_log, tuple(os.environ["RAYMM_ROADS_FOLDERS"].split(os.pathsep)))
