"""Ray workers that are forked from a process in which torch and transformers are already imported.

Importing them takes several seconds of CPU time per worker, and on one machine all ranks and data
workers import at the same time as the driver. Within :func:`forked_workers`, ``ray.init`` starts a
cluster whose raylet runs this file instead of Ray's worker setup script. The file requests a fork
from a server process. The child continues as Ray's own worker with the arguments, environment,
folder and outputs that it would have had otherwise. Every actor is still a separate process. Its
modules are already imported, in memory that is shared with the other workers.

Servers belong to the process that starts them (:func:`start_servers`) and end with it, however it
ends. A process that has not started any thread yet can import once for both and fork the server
from itself (:func:`start_servers_early`). One difference remains: workers of one server have the
same hash seed, so their sets have the same order. Ray starts workers itself if their
``runtime_env`` has more than variables, and all workers if servers cannot be used: with
``RAYMM_FRESH_WORKERS=1``, on other systems than Linux, and on machines with NVIDIA GPUs, whose
driver does not survive a fork.

The raylet runs this file for each worker, so the file imports only Python's own modules.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import secrets
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

MODULES = ("torch", "torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils")
# Imported for the first worker, because Ray reads its settings from the environment only once.
RAY_MODULES = (
    "ray", "ray.actor", "ray._private.node", "raymm.actors.rank.rank_actor",
    "raymm.actors.rank.module_profiler",
    "raymm.data.loading.loader", "raymm.layout.stage_builders", "raymm.batch.check",
    # Imported by every worker before its first call (ray.util.serialization_addons).
    "pydantic.v1.fields", "pyarrow.json", "starlette.datastructures",
)
# Variables that differ between the workers of a node; Ray's other variables are settings. A worker
# with the raylet process id of another cluster ends immediately.
_OF_A_WORKER = ("RAY_JOB_ID", "RAY_CLIENT_MODE")
OFF = "RAYMM_FRESH_WORKERS"
_ADDRESSES = "RAYMM_WORKER_SERVERS"
_NVIDIA = "/dev/nvidiactl"
# Libraries must not start threads when they are loaded, because threads do not survive a fork.
_SINGLE = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class _Forked:
    """Process that was forked from this one, with the interface of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


# Process, address, and one end of a pipe. The server lives until that end closes.
_servers: list[tuple[subprocess.Popen | _Forked, str, int]] = []
_had: set[str] = set()  # addresses of servers used by a cluster, which no other cluster can use


def start_servers(
    count: int = 1, modules: Sequence[str] = (), ray_modules: Sequence[str] = RAY_MODULES
) -> None:
    """Start the servers of this process unless unused ones are running. They import in the
    background.

    Args:
        count: number of servers; each worker is forked from a random one.
        modules: modules to import in addition to :data:`MODULES`.
        ray_modules: modules that import Ray, whose settings are then those of the first worker,
            including its node. Empty for workers of several nodes.
    """
    if not _possible():
        return
    for server in list(_servers):
        if server[0].poll() is not None or server[1] in _had:
            _servers.remove(server)
            os.close(server[2])
    while len(_servers) < count:
        _servers.append(_start_server((*MODULES, *modules), ray_modules))


def start_servers_early() -> None:
    """Fork a server from this process if Ray will be embedded. Call it from a process with one
    thread that is about to import :data:`MODULES`; they are imported here."""
    if os.environ.get("RAY_ADDRESS") not in (None, "", "local") or not _possible() or _servers:
        return
    if _threads() == 1:
        with single_threaded():
            for module in MODULES:
                importlib.import_module(module)
    # Ray in a worker must read its settings from the worker's environment.
    if _threads() == 1 and "ray" not in sys.modules:
        _servers.append(_fork_server())
    else:
        start_servers()


def _possible() -> bool:
    switched_off = os.environ.get(OFF) == "1"
    return sys.platform == "linux" and not switched_off and not os.path.exists(_NVIDIA)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def single_threaded() -> Iterator[None]:
    """Import libraries without threads within the block, so that this process can still be forked.
    The thread count of torch is set afterwards as usual; numpy's linear algebra keeps one thread.
    """
    name = "OPENBLAS_NUM_THREADS"
    old_value = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if old_value is not None:
            os.environ[name] = old_value


def _address() -> str:
    return f"raymm-workers-{os.getpid()}-{secrets.token_hex(8)}"


def _start_server(
    modules: Sequence[str], ray_modules: Sequence[str]
) -> tuple[subprocess.Popen, str, int]:
    address = _address()
    lives, owned = os.pipe()
    folders = [os.path.abspath(folder) for folder in sys.path]
    task = {"modules": modules, "ray": ray_modules, "path": folders}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", str(listener.fileno()),
             str(lives), json.dumps(task)],
            pass_fds=(listener.fileno(), lives), start_new_session=True, cwd="/",
            env={**os.environ, **_SINGLE}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    os.close(lives)
    return process, address, owned


def server_variables() -> dict[str, str]:
    """Return the environment variables that let a child process use this process's servers."""
    servers = _servers if _possible() else []
    addresses = [address for process, address, _ in servers if process.poll() is None]
    return {_ADDRESSES: " ".join(addresses)} if addresses else {}


def _fork_server() -> tuple[_Forked, str, int]:
    address = _address()
    lives, owned = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(128)
        pid = os.fork()
        if pid == 0:
            _leave_parent(owned)
            task = {"modules": (), "ray": RAY_MODULES, "path": list(sys.path)}
            _run_to_its_end(partial(_serve, listener, lives, task))
    os.close(lives)
    return _Forked(pid), address, owned


def _leave_parent(owned: int) -> None:
    """Detach a forked child from its parent: signals, session, standard streams and folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    os.close(owned)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(null, target)
    if null > 2:
        os.close(null)
    sys.path[:] = [os.path.abspath(folder) for folder in sys.path]
    os.chdir("/")
    os.environ.update(_SINGLE)


def _run_to_its_end(function: Callable[[], object]) -> NoReturn:
    """Run a function as the rest of this process. Never returns into the parent's code."""
    code: object = 1
    try:
        function()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def forked_workers() -> Iterator[None]:
    """Make clusters that start within the block fork their workers, if servers run in this process
    or in the process that passed its :func:`server_variables`."""
    from ray._private import ray_constants

    inherited = os.environ.get(_ADDRESSES)
    os.environ.update(server_variables())
    if _ADDRESSES not in os.environ:
        yield
        return
    # Ray joins this name to a folder; an absolute path replaces the folder.
    original = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)
    try:
        yield
    finally:
        _had.update(address for _, address, _ in _servers)
        ray_constants.SETUP_WORKER_FILENAME = original
        del os.environ[_ADDRESSES]
        if inherited is not None:
            os.environ[_ADDRESSES] = inherited


def _ask(arguments: list[str]) -> None:
    """Have a worker forked and live as long as it does. Become a worker if no fork is possible."""
    options = dict(text.split("=", 1) for text in arguments if re.match("--.*=", text))
    context = json.loads(options.get("--serialized-runtime-env-context") or "{}")
    variables = context.pop("env_vars", None) or {}
    context.pop("py_executable", None)
    plain = not any(context.values()) and not any("$" in value for value in variables.values())
    plain = plain and "PYTHONPATH" not in variables  # PYTHONPATH takes effect when Python starts
    if plain and options.get("--language") == "PYTHON":
        environment = {**os.environ, **variables}
        addresses = environment.pop(_ADDRESSES, "").split()
        request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
        if addresses and _forked(addresses[os.getpid() % len(addresses)], request):
            return
    from ray._private.workers import setup_worker

    os.environ.pop(_ADDRESSES, None)
    os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])


def _forked(address: str, request: dict) -> bool:
    """Return True after a forked worker has ended; False if the server forked none."""
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{address}")
            socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2])
            connection.sendall(message)
            if connection.recv(1) != b"1":
                return False
        except ConnectionError:
            return False
        try:
            connection.recv(1)  # returns when the worker closes the other end
        except ConnectionError:
            pass
        return True


def _serve(listener: socket.socket, lives: int, task: dict) -> None:
    """Import the workers' modules, then fork a worker for each connection until the owner ends."""
    # The kernel sends SIGIO, which ends the process, when the pipe's other end closes.
    fcntl.fcntl(lives, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lives, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        if os.read(lives, 1) == b"":
            return  # the owner has ended already
    except BlockingIOError:
        pass
    sys.path[:] = task["path"]
    _import(task["modules"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    settings = None
    while True:
        connection, _ = listener.accept()
        try:
            request, outputs = _receive(connection)
        except ConnectionError:  # the requesting process was killed, or is not the user's
            connection.close()
            continue
        requested = _ray_settings(request["environment"])
        if not task["ray"]:
            settings = requested
        elif settings is None:
            settings = requested
            os.environ.update(request["environment"])
            _import(task["ray"])
        if requested != settings:
            for file in outputs:
                os.close(file)
            connection.close()
            continue
        if os.fork() == 0:
            listener.close()
            os.close(lives)
            _run_to_its_end(partial(_become_worker, connection, request, outputs))
        for file in outputs:
            os.close(file)
        connection.close()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(ModuleNotFoundError):  # optional, or the worker reports it better
            importlib.import_module(module)
    if "numba" in sys.modules:  # set up the registries once for all workers
        from numba.core.registry import cpu_target

        for context in "typing_context", "target_context":  # type checkers do not know their types
            getattr(cpu_target, context).refresh()
    if _threads() != 1:
        sys.exit("a fork would lose the other threads")  # Ray then starts workers itself
    gc.collect()
    gc.freeze()


def _ray_settings(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that Ray reads when it is imported."""
    return {
        name: value for name, value in environment.items()
        if name.startswith("RAY_") and name not in _OF_A_WORKER
    }


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("iII", credentials)[1] != os.getuid():
        raise ConnectionError("the request comes from another user")
    head, outputs, _, _ = socket.recv_fds(connection, 8, 3)
    message = bytearray()
    while len(message) < int.from_bytes(head, "little"):
        if not (chunk := connection.recv(1 << 16)):
            raise ConnectionError("the request ends early")
        message += chunk
    if len(outputs) != 3:
        raise ConnectionError("the request has no outputs")
    return json.loads(message), list(outputs)


def _become_worker(connection: socket.socket, request: dict, outputs: list[int]) -> None:
    os.setpgid(0, 0)  # Ray kills the process group of a worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, file in enumerate(outputs):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for module in ("numpy.random", "torch"):  # Python reseeds its own generator after a fork
        if module in sys.modules:
            sys.modules[module].seed()
    connection.sendall(b"1")
    # Only the setup script reads these arguments.
    setup_arguments = ("--language", "--serialized-runtime-env-context")
    sys.argv = [text for text in request["arguments"] if not text.startswith(setup_arguments)]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are not top-level modules
    if sys.argv[1] == "--serve":
        _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        _ask(sys.argv[1:])
