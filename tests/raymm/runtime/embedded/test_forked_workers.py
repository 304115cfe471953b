"""Forked workers of an embedded cluster, through one replaced private constant of Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray._private import ray_constants

from raymm.runtime.embedded import forked_workers

FILE = Path(forked_workers.__file__).resolve()
CHANGED = (
    "Ray has changed where it takes the file from that its raylet starts workers with: "
    "forked_workers() in raymm/runtime/embedded/forked_workers.py is to follow, or every rank "
    "imports torch anew"
)
# Seconds that a process may take to end.
PATIENCE_S = 30
WORKER = """
import os, sys
numbers = sys.modules.get("numpy.random")  # imported before the fork
drawn = numbers and numbers.random()
print(os.getpid(), os.environ.get("COLOUR"), drawn, *sys.argv[1:], flush=True)
os.execv("/bin/cat", ["cat", "/proc/self/stat"])
"""
OWNER = """
import json, sys, time
from raymm.runtime.embedded import forked_workers
forked_workers.MODULES, forked_workers.RAY_MODULES = (), ("numpy.random",)
forked_workers.start_servers(2, ray_modules=("numpy.random",))
print(json.dumps([[server[0].pid, server[1]] for server in forked_workers._servers]), flush=True)
time.sleep(600)
"""
FORKED = (
    'start_servers(2, ray_modules=("numpy.random",))',
    "_servers.extend(forked_workers._fork_server() for _ in range(2))",
)


@pytest.fixture(params=["started", "forked"])
def owner(request):
    """Return a process with two servers that import nothing, and their ids and addresses."""
    code = OWNER if request.param == "started" else OWNER.replace(*FORKED)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def worker(address: str, folder: Path, **variables: str) -> dict:
    """Start a worker as the raylet does; return its output and its parent's process id."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(FILE), str(script), "--node=7", "--language=PYTHON"]
    environment = {**os.environ, **variables, forked_workers._ADDRESSES: address}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    words, stat = done.stdout.splitlines()
    return {"printed": words.split(), "parent": int(stat.rpartition(")")[2].split()[1])}


def test_rays_private_constant_exists(ray_cluster):
    name = getattr(ray_constants, "SETUP_WORKER_FILENAME", None)
    assert name == "setup_worker.py", CHANGED
    with forked_workers.forked_workers():
        assert Path(ray_constants.SETUP_WORKER_FILENAME) == FILE
    assert ray_constants.SETUP_WORKER_FILENAME == name


def test_a_worker_is_forked_from_a_server_with_torch(ray_cluster):
    @ray_cluster.remote(num_cpus=0)
    def parent() -> list[str]:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        return command.decode().split("\0")

    assert [str(FILE), "--serve"] == ray_cluster.get(parent.remote())[1:3], CHANGED


def ended(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


EARLY = """
import json, os, sys, time
from raymm.runtime.embedded import forked_workers
forked_workers.MODULES, forked_workers.RAY_MODULES = ("fractions",), ()
held = open(sys.argv[1], "w")
os.environ.pop("RAY_ADDRESS", None)
forked_workers.start_servers_early()
forked_workers.start_servers()
held.write("once")
((server, address, _),) = forked_workers._servers
assert "fractions" in sys.modules and "OPENBLAS_NUM_THREADS" not in os.environ
print(json.dumps([server.pid, address, server.poll()]), flush=True)
os.kill(server.pid, 9)
while server.poll() is None:
    time.sleep(0.01)
print(server.poll(), flush=True)
forked_workers.start_servers(ray_modules=())  # the ended one is replaced
((server, _, _),) = forked_workers._servers
print(server.poll())
"""


def test_a_process_that_has_not_begun_is_the_server_itself(tmp_path):
    variables = {n: v for n, v in os.environ.items() if n != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(tmp_path / "held")], env=variables, text=True,
        capture_output=True, timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    first, code, after = done.stdout.splitlines()  # nothing is printed twice
    pid, _, polled = json.loads(first)
    assert polled is None and code == "-9" and after == "None"
    assert (tmp_path / "held").read_text() == "once" and ended(pid)


TRAIN = """
import os, sys
from raymm.runtime.embedded import forked_workers
def early():
    slow = [name for name in ("ray", "torch", "transformers") if name in sys.modules]
    print(slow, len(os.listdir("/proc/self/task")))
    raise SystemExit
forked_workers.start_servers_early = early
from raymm.cli.main import main
main(["train", "run.yaml"])
"""
CONFIG = """
run: {storage_path: run, steps: 1}
model: {language_model: {config: {model_type: llama}}}
data: {train: rows.jsonl, tokenizer: ., batch_size: 1, microbatches: 1}
"""


def test_the_command_starts_servers_before_anything_slow(tmp_path):
    """Start them after the configuration is checked, with one thread, so that forks are safe."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    variables = {n: v for n, v in os.environ.items() if n != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=variables, cwd=tmp_path, capture_output=True, text=True,
    )
    assert done.stdout == "[] 1\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_their_owner(owner, number):
    process, servers = owner
    assert len(servers) == 2 and len({address for _, address in servers}) == 2
    process.send_signal(number)
    process.wait()
    assert all(ended(pid) for pid, _ in servers)


def test_invalid_requests_do_not_end_a_server(owner, tmp_path):
    _, ((pid, address), _) = owner
    for message in (b"", b"\0" * 8, (100).to_bytes(8, "little") + b"{}"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{address}")
            connection.sendall(message)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
    assert worker(address, tmp_path)["parent"] == pid


def test_a_worker_has_its_own_environment_and_outputs(owner, tmp_path):
    _, ((pid, address), _) = owner
    first = worker(address, tmp_path, COLOUR="red")
    second = worker(address, tmp_path)
    assert first["parent"] == second["parent"] == pid
    assert first["printed"][1] == "red" and second["printed"][1] == "None"
    assert first["printed"][3:] == ["--node=7"]
    assert first["printed"][0] != second["printed"][0]  # separate processes
    assert "None" != first["printed"][2] != second["printed"][2]  # separate random numbers


def test_a_worker_with_other_ray_settings_is_not_forked(owner, tmp_path):
    _, ((pid, address), _) = owner
    assert worker(address, tmp_path, RAY_heartbeat="1")["parent"] == pid
    # By Ray's own script, which replaces the calling process.
    other = worker(address, tmp_path, RAY_heartbeat="2")
    assert other["parent"] == os.getpid() and other["printed"][2:] == ["None", "--node=7"]
    assert worker(address, tmp_path, RAY_heartbeat="1", RAY_JOB_ID="3")["parent"] == pid
    # It would check for that process, and end because it does not exist.
    other = worker(address, tmp_path, RAY_heartbeat="1", RAY_RAYLET_PID="4")
    assert other["parent"] == os.getpid()


def test_a_second_cluster_has_separate_servers(monkeypatch):
    for name in ("_servers", "_had"):
        monkeypatch.setattr(forked_workers, name, type(getattr(forked_workers, name))())
    monkeypatch.setattr(forked_workers, "MODULES", ())
    servers = []
    for _ in range(2):
        forked_workers.start_servers(ray_modules=())
        forked_workers.start_servers(ray_modules=())  # it already runs
        ((server, address, end),) = forked_workers._servers
        servers.append((server.pid, address))
        with forked_workers.forked_workers():
            assert forked_workers.server_variables() == {forked_workers._ADDRESSES: address}
    assert len(set(servers)) == 2 and ended(servers[0][0]) and server.poll() is None
    os.close(end)
    assert ended(server.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
def test_other_users_get_no_worker(owner, tmp_path):
    _, ((pid, address), _) = owner
    code = (
        "import os\nfrom raymm.runtime.embedded import forked_workers as m\nos.setuid(65534)\n"
        f"print(m._forked({address!r}, {{'arguments': []}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    assert worker(address, tmp_path)["parent"] == pid


def test_without_servers_ray_starts_its_own_workers(monkeypatch):
    monkeypatch.setattr(forked_workers, "_servers", [])
    with forked_workers.forked_workers():
        assert ray_constants.SETUP_WORKER_FILENAME == "setup_worker.py"
    monkeypatch.setenv(forked_workers.OFF, "1")
    forked_workers.start_servers()
    assert forked_workers._servers == []
