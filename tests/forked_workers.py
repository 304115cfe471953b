"""Ray workers that are forked from a process which has imported torch and transformers already.

A rank takes 5 s of CPU time to import them and some milliseconds for what a test wants of it, so
a suite that starts a thousand ranks on two cores would do little else. Within
:func:`forked_workers`, ``ray.init`` starts a cluster whose raylet runs this file in place of
Ray's ``setup_worker.py``. It asks a server process to fork, and the child goes on as Ray's own
``default_worker.py`` with the arguments, environment, folder and outputs it would have had.
Every actor is a process of its own as ever; it only finds its modules imported.

What is not as ever: two processes may have the same hash seed, thus the same order of sets.
Every cluster has :data:`SERVERS` servers, so that ranks of a group differ in it. Runs that tests
start in processes of their own (``tiny_run.start``) get their workers from Ray itself, as do
actors with a ``runtime_env`` of more than variables, and all with ``RAYMM_FRESH_WORKERS=1``.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import contextmanager

SERVERS = 2
MODULES = (
    "ray", "ray.actor", "ray._private.node", "raymm.actors.rank.rank_actor",
    "raymm.actors.rank.module_profiler", "raymm.data.loading.worker",
    "torch._dynamo", "torch.distributed.tensor",
    *(f"transformers.models.{name}.modeling_{name}"
      for name in ("gemma3", "gpt2", "llama", "qwen3", "siglip", "whisper")),
)  # fmt: skip
# How often a server looks whether its raylet is still there.
RAYLET_CHECK_SECONDS = 2.0


@contextmanager
def forked_workers():
    """Clusters that start in here fork their workers (on Linux)."""
    from ray._private import ray_constants

    if sys.platform != "linux" or os.environ.get("RAYMM_FRESH_WORKERS") == "1":
        yield
        return
    # Joined to the folder of Ray's own file, which an absolute path replaces.
    original = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = original


def ask(arguments: list[str]) -> None:
    """Have a worker forked and stay for as long as it lives, as the process that the raylet
    started; become a worker oneself where that cannot be."""
    options = dict(one.split("=", 1) for one in arguments if one.startswith("--") and "=" in one)
    context = json.loads(options.get("--serialized-runtime-env-context") or "{}")
    variables = context.pop("env_vars", None) or {}
    context.pop("py_executable", None)
    plain = not any(context.values()) and not any("$" in value for value in variables.values())
    if plain and options.get("--language") == "PYTHON":
        environment = {**os.environ, **variables}
        request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
        message = json.dumps(request).encode()
        connection = connect()
        try:
            socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2])
            connection.sendall(message)
            forked = connection.recv(1) == b"1"
        except ConnectionError:
            forked = False
        if forked:
            try:
                connection.recv(1)  # the worker holds the other end
            except ConnectionError:
                pass
            return
    from ray._private.workers import setup_worker

    os.execv(sys.executable, [sys.executable, setup_worker.__file__, *arguments])


def connect() -> socket.socket:
    """A connection to one of this cluster's servers, which the first who comes starts."""
    raylet, number = os.environ["RAY_RAYLET_PID"], os.getpid() % SERVERS
    address = f"\0raymm-forked-workers-{raylet}-{number}"
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except ConnectionRefusedError:
            connection.close()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
            listener.listen(128)
        except OSError:  # another one was faster
            time.sleep(0.05)
            continue
        if os.fork() == 0:
            os.setsid()
            os.set_inheritable(listener.fileno(), True)
            command = [sys.executable, os.path.abspath(__file__), "--serve", str(listener.fileno())]
            os.execv(sys.executable, command)
        listener.close()


def serve(listener: socket.socket) -> None:
    """Import what workers need, then fork one for every connection until the raylet ends."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path.pop(0)
    for module in MODULES:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) != 1:
        return  # a fork would lose the other threads; workers are started Ray's way then
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(RAYLET_CHECK_SECONDS)
    while os.path.exists(f"/proc/{raylet}"):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        try:
            request, outputs = receive(connection)
        except ConnectionError:  # who asked has been killed
            connection.close()
            continue
        if os.fork() == 0:
            listener.close()
            become_worker(connection, request, outputs)
        for file in (connection.fileno(), *outputs):
            os.close(file)
        connection.detach()


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """What :func:`ask` sends."""
    head, outputs, _, _ = socket.recv_fds(connection, 8, 3)
    message = bytearray()
    while len(message) < int.from_bytes(head, "little"):
        if not (part := connection.recv(1 << 16)):
            raise ConnectionError("the request ends early")
        message += part
    return json.loads(message), list(outputs)


def become_worker(connection: socket.socket, request: dict, outputs: list[int]) -> None:
    """Go on as Ray's worker in this process. Does not return."""
    os.setpgid(0, 0)  # Ray ends a worker's whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, file in enumerate(outputs):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    connection.sendall(b"1")
    own = ("--language", "--serialized-runtime-env-context")  # for setup_worker.py
    sys.argv = [one for one in request["arguments"] if not one.startswith(own)]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1:])
