"""An embedded Ray that does not come up."""

import os
import subprocess
import sys

import pytest

DRIVER = """
import subprocess
from raymm.actors.rank.rank_group import ClusterError
from raymm.runtime.cluster import connect
from raymm.runtime.cluster_guardian import session_processes
import os
try:
    connect()
except ClusterError as error:
    print("said:", error)
print("left:", session_processes(os.getpid()))
"""


@pytest.mark.ray
def test_what_does_not_come_up_is_a_sentence_and_leaves_nothing(tmp_path):
    """Ray's server is given no time at all to open its port."""
    environment = {
        **os.environ, "RAY_gcs_server_port_wait_time_s": "0", "RAY_TMPDIR": str(tmp_path)
    }
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )
    said = done.stdout
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "an embedded Ray did not come up on this machine" in said
    assert f"Its logs are in {tmp_path}" in said and "RAY_ADDRESS" in said
    assert "left: set()" in said
