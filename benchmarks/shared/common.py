"""Options, machine description, local Ray cluster and result line of all benchmarks.

A benchmark prints its tables on stderr and one JSON object as the last line of stdout.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

REPOSITORY = Path(__file__).resolve().parents[2]
# The channels of compiled graphs take most of it; untouched pages cost nothing.
OBJECT_STORE_BYTES = 3 * 2**30
SHARED_MEMORY_SHARE = 0.5
SHUTDOWN_SECONDS = 10
PACKAGES = ("torch", "ray", "transformers", "numpy")


def parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the common option `--json`."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument(
        "--json", action="store_true", help="print the result as JSON on the last line of stdout"
    )
    return result


def console() -> Console:
    """Return a console on stderr for tables and progress; stdout ends with the JSON object."""
    stderr = Console(stderr=True)
    return stderr if stderr.is_terminal else Console(stderr=True, width=120)


def cpu_model() -> str:
    """Return the CPU's name as the kernel or `platform` reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Return CPU, cores, memory (GiB), accelerators, versions, load and date, ready for JSON."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "gpus": gpus,
        "versions": versions,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def origin() -> dict[str, str | None]:
    """Return the command of this process and the commit of its code, ready for JSON.

    The commit is None in a copy without git.
    """
    def git(*command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    commit = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = git("rev-parse", "--short=8", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/log"):
            commit += " with changes"
    return {"command": shlex.join(["python", *sys.orig_argv[1:]]), "commit": commit}


def emit(result: dict[str, Any], as_json: bool) -> None:
    """Print `result` with its origin as one line of JSON if `as_json`."""
    sys.stderr.flush()
    if as_json:
        print(json.dumps(origin() | result), flush=True)


def skipped_without_gpu(console: Console, as_json: bool) -> bool:
    """Return True, and print a notice, if the machine has no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return False
    reason = "no CUDA device: nothing was timed"
    console.print(f"SKIPPED: {reason}.")
    emit({"skipped": reason, "machine": machine()}, as_json)
    return True


def worker_environment() -> dict[str, str]:
    """Return the environment of Ray workers: one compute thread, loopback gloo, this checkout."""
    search_path = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(path for path in search_path if path),
    }


def _object_store_bytes() -> int:
    """Return OBJECT_STORE_BYTES, or a share of the free shared memory if that is less."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return OBJECT_STORE_BYTES
    return min(OBJECT_STORE_BYTES, int(free * SHARED_MEMORY_SHARE))


def _remove(directory: Path) -> None:
    """Delete `directory`; terminating processes may still write to it."""
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)


@contextlib.contextmanager
def local_ray(num_cpus: int, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Start a private Ray cluster in its own temporary directory; remove both on exit.

    Args:
        num_cpus: logical CPUs, so that more actors than cores can be placed.
        environment: additional environment variables for workers.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default workers have a lower priority than the driver. This favours drivers that block over
    # drivers that poll, by far more than their own cost.
    os.environ["RAY_worker_niceness"] = "0"
    import ray

    # Unix socket paths are limited to 107 bytes, hence a short directory.
    directory = tempfile.mkdtemp(prefix="rb-", dir="/tmp")
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=True,
            logging_level="error",
            object_store_memory=_object_store_bytes(),
            _temp_dir=directory,
            runtime_env={"env_vars": {**worker_environment(), **(environment or {})}},
        )
        # Ray's own handler exits immediately and leaves its files behind.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        yield
    finally:
        ray.shutdown()
        _remove(Path(directory))
