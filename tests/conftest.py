"""One Ray cluster for the whole test session (one per process of pytest-xdist).

Starting Ray costs seconds, so tests share a cluster of logical CPUs; its workers are forked
(:mod:`raymm.runtime.embedded.forked_workers`), because importing torch and transformers in every
actor costs more.
"""

import os

# Before anything imports torch or numpy: every process of pytest-xdist has a core, and threads that
# wait for each other by spinning take it from the other one's (tests of small tensors took sixty
# times as long).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of the S3 server that tests start, for all processes; nothing here reaches another one.
os.environ |= {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from needs import (  # noqa: F401 (hooks)
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_protocol,
)
from s3_server import running_s3, s3  # noqa: F401 (fixtures)
from small_disk import small_disk  # noqa: F401 (fixture)

# What a property test draws is the same in every run, so that what passes once passes always;
# `make explore` draws others, and more of them. A deadline would be an assertion on wall time, and
# compiled code is slow the first time.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("fixed")

# A shell starts what runs in its background with SIGINT ignored, and processes hand that down:
# tests that send one mean a process that was started like any other.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Logical CPUs, whatever the machine has: enough for the largest test (6 ranks). Ray prestarts
# a worker per CPU, so more would only cost time.
CLUSTER_CPUS = 8
# Whose ranks many tests start.
MODELS = ("gemma3", "gpt2", "llama", "qwen3", "siglip", "whisper")
# How long the cluster may take to notice that an actor has ended.
ACTORS_END_SECONDS = 30


@pytest.fixture
def ended_actors():
    """Waits for the end of the actors that the test has started, and returns their states."""
    import ray._private.state

    def states() -> dict[str, str]:
        return {name: one["State"] for name, one in ray._private.state.actors().items()}

    before = states()

    def wait() -> list[str]:
        # The cluster learns of an actor's end a moment later.
        deadline = time.monotonic() + ACTORS_END_SECONDS
        while True:
            mine = [state for name, state in states().items() if name not in before]
            if set(mine) <= {"DEAD"} or time.monotonic() > deadline:
                return mine
            time.sleep(0.2)

    return wait


@pytest.fixture(scope="session")
def ray_cluster():
    """A local cluster of :data:`CLUSTER_CPUS` logical CPUs with a temp folder and ports of its
    own: every pytest-xdist worker has one."""
    import ray

    from raymm.runtime.embedded.embedded_ray import start_embedded_ray
    from raymm.runtime.embedded.forked_workers import start_servers

    # Ranks unpickle modules and callbacks that tests define, so they need the folders that
    # pytest put on this process's path.
    here = str(Path(__file__).parent)
    folders = [path for path in sys.path if path.startswith(here)]
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])
    # Ray kills what it likes when others use the machine's memory up.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    # Two, so that ranks of a group differ in the order of their sets.
    start_servers(2, [f"transformers.models.{name}.modeling_{name}" for name in MODELS])
    # Short: Ray's socket paths below it must stay under 107 characters.
    folder = tempfile.mkdtemp(prefix="raymm-", dir="/tmp")
    start_embedded_ray(
        num_cpus=CLUSTER_CPUS, log_to_driver=False, object_store_memory=200 * 2**20,
        _temp_dir=folder,
    )
    if inherited is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = inherited
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def joins(ray_cluster) -> dict[str, str]:
    """Environment of a process that joins the session's cluster. Ray would look for a cluster that
    listens on the loopback interface at this machine's other address, except where it believes that
    there are no others."""
    return {
        "RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token",
        "RAY_memory_monitor_refresh_ms": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
