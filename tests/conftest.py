"""One Ray cluster for the whole test session (one per process of pytest-xdist).

Starting Ray takes seconds, so tests share a cluster of logical CPUs. Its workers are forked
(:mod:`raymm.runtime.embedded.forked_workers`), because importing torch and transformers in every
actor takes longer.
"""

import os

# Set before torch or numpy is imported: every process of pytest-xdist has one core, and spinning
# threads take it from the other processes (tests of small tensors took sixty times as long).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Credentials of the tests' S3 server for all processes; no other server is used.
os.environ |= {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

import gc
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.needs import (  # noqa: F401 (hooks)
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_protocol,
)
from tests.support.run_fixtures import (  # noqa: F401 (fixtures)
    finished,
    inputs,
    make_config,
    no_new_actors,
    raymm,
)
from tests.support.s3_server import running_s3, s3  # noqa: F401 (fixtures)
from tests.support.small_disk import small_disk  # noqa: F401 (fixture)

# Property tests draw the same examples in every run, so that results are reproducible; `make
# explore` draws other and more examples. A deadline would be an assertion on wall time, and
# compiled code is slow the first time.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=12)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("fixed")

# A shell starts background processes with SIGINT ignored, and child processes inherit that. Tests
# that send SIGINT need the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Logical CPUs, whatever the machine has: enough for the largest test (6 ranks). Ray prestarts a
# worker per CPU, so more would only take time.
CLUSTER_CPUS = 8
# Models whose ranks many tests start.
MODELS = ("gemma3", "gpt2", "llama", "qwen3", "siglip", "whisper")
# Seconds that the cluster may take to notice the end of an actor.
ACTORS_END_SECONDS = 30
# Seconds without a line after which progress is printed: longer than a test may take.
NO_LINE_S = 3600.0


@pytest.fixture(scope="session", autouse=True)
def no_timed_lines():
    """Prevent the lines that are printed only if work takes seconds.

    Outputs of tests must not depend on the speed of the machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymm.training.under_way.SILENCE_S", NO_LINE_S)
        patch.setattr("raymm.monitor.progress.SILENCE_S", NO_LINE_S)
        yield


def pytest_collection_finish() -> None:
    """Exclude what collecting created from garbage collection: a million objects, which every full
    collection during the tests would look at."""
    gc.freeze()


@pytest.fixture
def blank_pictures(monkeypatch):
    """Leave the pictures in reports of runs blank: drawing them takes seconds of every run."""
    from PIL import Image

    def draw(_: object, path: Path, **options: object) -> None:
        Image.new("RGB", (1, 1)).save(path)

    for name in ("draw_plan", "draw_loss", "draw_timelines"):
        monkeypatch.setattr(f"raymm.monitor.report.{name}", draw)


@pytest.fixture
def ended_actors():
    """Return a function that waits for the test's actors to end and returns their states."""
    import ray._private.state

    def states() -> dict[str, str]:
        return {name: one["State"] for name, one in ray._private.state.actors().items()}

    before = states()

    def wait() -> list[str]:
        # The cluster detects an actor's end a moment later.
        deadline = time.monotonic() + ACTORS_END_SECONDS
        while True:
            mine = [state for name, state in states().items() if name not in before]
            if set(mine) <= {"DEAD"} or time.monotonic() > deadline:
                return mine
            time.sleep(0.2)

    return wait


@pytest.fixture(scope="session")
def ray_cluster():
    """Start a local cluster of :data:`CLUSTER_CPUS` logical CPUs.

    Every pytest-xdist worker has one with its own temp folder and ports.
    """
    import ray

    from raymm.runtime.embedded.embedded_ray import start_embedded_ray
    from raymm.runtime.embedded.forked_workers import start_servers

    # Ranks unpickle modules and callbacks that tests define.
    root = str(Path(__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, inherited]))
    # Otherwise Ray kills workers when other processes use up the machine's memory.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    # Two servers, so that ranks of a group iterate over sets in different orders.
    start_servers(2, [f"transformers.models.{name}.modeling_{name}" for name in MODELS])
    # Ray's socket paths below it must stay under 107 characters.
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
    """Return the environment of a process that joins the session's cluster.

    For a cluster that listens on the loopback interface, Ray would use this machine's other address
    unless it finds no other.
    """
    return {
        "RAY_ADDRESS": ray_cluster.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token",
        "RAY_memory_monitor_refresh_ms": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
