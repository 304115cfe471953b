"""Workers of the session's cluster are forked, by the one private constant of Ray that tests
replace."""

import os
from pathlib import Path

import forked_workers
from ray._private import ray_constants

SETUP_FILE = Path(forked_workers.__file__).resolve()
CHANGED = (
    "Ray has changed where it takes the file from that its raylet starts workers with: "
    "forked_workers() in tests/forked_workers.py is to follow, or every rank imports torch anew"
)


def test_the_constant_is_where_it_was():
    found = getattr(ray_constants, "SETUP_WORKER_FILENAME", None)
    assert found == "setup_worker.py", CHANGED
    with forked_workers.forked_workers():
        assert Path(ray_constants.SETUP_WORKER_FILENAME) == SETUP_FILE
    assert ray_constants.SETUP_WORKER_FILENAME == found


def test_a_worker_is_the_child_of_a_server_that_has_imported_torch(ray_cluster):
    @ray_cluster.remote(num_cpus=0)
    def parent() -> list[str]:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        return command.decode().split("\0")

    assert [str(SETUP_FILE), "--serve"] == ray_cluster.get(parent.remote())[1:3], CHANGED
