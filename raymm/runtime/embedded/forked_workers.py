"""Ray workers that are forked from a process which has imported torch and transformers already.

A rank takes several seconds of CPU time to import them, and on one machine all ranks and data
workers do that at the same time as the driver does. Within :func:`forked_workers`, ``ray.init``
starts a cluster whose raylet runs this file in place of Ray's script that sets workers up. It asks
a server process to fork, and the child goes on as Ray's own worker with the arguments, environment,
folder and outputs it would have had. Every actor is a process of its own as ever; it
only finds its modules imported, in memory that it shares with the others.

Servers belong to the process that starts them (:func:`start_servers`) and end with it, however it
ends. A process that has not begun anything yet imports once for both and is forked itself
(:func:`start_servers_early`). What is not as ever: processes of one server have the same hash seed,
thus the same order of sets. Workers with a ``runtime_env`` of more than variables are started by
Ray itself, as are all where servers cannot be had: with ``RAYMM_FRESH_WORKERS=1``, beyond Linux,
and on machines with NVIDIA GPUs, whose driver does not outlive a fork.

Run as a file by the raylet for each worker, so it imports nothing but Python's own modules.
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
# Imported when the first worker is asked for: Ray reads its settings from the environment, once.
RAY_MODULES = (
    "ray", "ray.actor", "ray._private.node", "raymm.actors.rank.rank_actor",
    "raymm.actors.rank.module_profiler",
    "raymm.data.loading.worker", "raymm.layout.stage_builders", "raymm.batch.check",
    # Of every worker before its first call (ray.util.serialization_addons).
    "pydantic.v1.fields", "pyarrow.json", "starlette.datastructures",
)
# What differs between a node's workers; any other variable of Ray's is a setting. A worker with
# the process of another cluster's raylet ends at once.
_OF_A_WORKER = ("RAY_JOB_ID", "RAY_CLIENT_MODE")
OFF = "RAYMM_FRESH_WORKERS"
_ADDRESSES = "RAYMM_WORKER_SERVERS"
_NVIDIA = "/dev/nvidiactl"
# Threads that a library starts when it is loaded would not be there after a fork.
_SINGLE = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class _Forked:
    """A process that was forked from this one; as of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


# Process, address, and the end of a pipe: the server lives until that closes.
_servers: list[tuple[subprocess.Popen | _Forked, str, int]] = []
_had: set[str] = set()  # addresses of those that a cluster has had, and no other one can have


def start_servers(
    count: int = 1, modules: Sequence[str] = (), ray_modules: Sequence[str] = RAY_MODULES
) -> None:
    """Start the servers of this process, if none run that no cluster has had yet. They import while
    it goes on.

    Args:
        count: processes; a worker is forked from one of them by chance.
        modules: to import beside :data:`MODULES`.
        ray_modules: those that import Ray, which then has the settings of the first worker, its
            node's among them. None of them: for workers of several nodes.
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
    """Start one if Ray is going to be embedded: for a process of one thread that is about to import
    :data:`MODULES` itself. It does so here, and the server is its child."""
    if os.environ.get("RAY_ADDRESS") not in (None, "", "local") or not _possible() or _servers:
        return
    if _threads() == 1:
        with single_threaded():
            for module in MODULES:
                importlib.import_module(module)
    # Ray in a worker has read its settings from the worker's environment.
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
    """Import libraries without threads, so that this process can still be forked. torch's threads
    are set afterwards, as always; numpy's linear algebra in this process stays with one."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


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
    """By which a process finds the servers of this one; none if none run, or none are wanted."""
    servers = _servers if _possible() else []
    addresses = [address for process, address, _ in servers if process.poll() is None]
    return {_ADDRESSES: " ".join(addresses)} if addresses else {}


def _fork_server() -> tuple[_Forked, str, int]:
    """A server that is this process, as far as it has come."""
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
    """In a child: nothing of it reaches what is its parent's."""
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
    """All that this process still does: it does not return into what its parent was doing."""
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
    """Clusters that start in here fork their workers, if servers run: this process's, or those of
    the one that has given it :func:`server_variables`."""
    from ray._private import ray_constants

    inherited = os.environ.get(_ADDRESSES)
    os.environ.update(server_variables())
    if _ADDRESSES not in os.environ:
        yield
        return
    # Joined to the folder of Ray's own file, which an absolute path replaces.
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
    """Have a worker forked and stay for as long as it lives, as the process that the raylet
    started; become a worker oneself where that cannot be."""
    options = dict(text.split("=", 1) for text in arguments if re.match("--.*=", text))
    context = json.loads(options.get("--serialized-runtime-env-context") or "{}")
    variables = context.pop("env_vars", None) or {}
    context.pop("py_executable", None)
    plain = not any(context.values()) and not any("$" in value for value in variables.values())
    plain = plain and "PYTHONPATH" not in variables  # read when Python starts
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
    """Whether a server has forked a worker; returns when it has ended."""
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
            connection.recv(1)  # the worker holds the other end
        except ConnectionError:
            pass
        return True


def _serve(listener: socket.socket, lives: int, task: dict) -> None:
    """Import what workers need, then fork one for every connection until the owner ends."""
    # The kernel sends SIGIO, which ends the process, when the pipe's other end closes.
    fcntl.fcntl(lives, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lives, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        if os.read(lives, 1) == b"":
            return  # it has ended already
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
        except ConnectionError:  # who asked has been killed, or is somebody else
            connection.close()
            continue
        asked = _ray_settings(request["environment"])
        if not task["ray"]:
            settings = asked
        elif settings is None:
            settings = asked
            os.environ.update(request["environment"])
            _import(task["ray"])
        if asked != settings:
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
        with suppress(ModuleNotFoundError):  # which a worker may do without, or says it better
            importlib.import_module(module)
    if "numba" in sys.modules:  # what it sets up for its first function, once for all
        from numba.core.registry import cpu_target

        for context in "typing_context", "target_context":  # their types are known to no checker
            getattr(cpu_target, context).refresh()
    if _threads() != 1:
        sys.exit("a fork would lose the other threads")  # Ray starts workers its way then
    gc.collect()
    gc.freeze()


def _ray_settings(environment: dict[str, str]) -> dict[str, str]:
    """Variables that Ray has read when it was imported."""
    return {
        name: value for name, value in environment.items()
        if name.startswith("RAY_") and name not in _OF_A_WORKER
    }


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """What :func:`_forked` sends."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("iII", credentials)[1] != os.getuid():
        raise ConnectionError("the request comes from another user")
    head, outputs, _, _ = socket.recv_fds(connection, 8, 3)
    message = bytearray()
    while len(message) < int.from_bytes(head, "little"):
        if not (part := connection.recv(1 << 16)):
            raise ConnectionError("the request ends early")
        message += part
    if len(outputs) != 3:
        raise ConnectionError("the request has no outputs")
    return json.loads(message), list(outputs)


def _become_worker(connection: socket.socket, request: dict, outputs: list[int]) -> None:
    """Go on as Ray's worker in this process, until it ends."""
    os.setpgid(0, 0)  # Ray ends a worker's whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, file in enumerate(outputs):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for module in ("numpy.random", "torch"):  # Python's own random numbers are anew after a fork
        if module in sys.modules:
            sys.modules[module].seed()
    connection.sendall(b"1")
    own = ("--language", "--serialized-runtime-env-context")  # for the script that sets up
    sys.argv = [text for text in request["arguments"] if not text.startswith(own)]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are no modules of the top level
    if sys.argv[1] == "--serve":
        _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        _ask(sys.argv[1:])
