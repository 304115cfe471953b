"""A run whose cluster is lost ends immediately, with a correct message."""

import re
import subprocess
import sys

import pytest

from tests.support import SUPPORT

# Timeout for two nodes' servers and six processes that import all packages, on a busy machine.
PATIENCE_S = 600


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(PATIENCE_S + 10)
def test_a_lost_node_or_gcs_ends_the_run(tmp_path):
    """Kill the node's server, then stop the cluster's server.

    Without detection, the processes of the node would continue for a quarter of a minute, and steps
    without the cluster's server would continue to the end.
    """
    script = SUPPORT / "lost_cluster.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    ranks = re.search(r"ranks there: (.*)", said)[1].strip("[]").split(", ")
    node, server = re.findall(r"lost: (.*)", said)
    assert "is gone: its Ray server (raylet) does not listen any more" in node
    assert set(re.findall(r"rank (\d) ", node)) == set(ranks) != set()
    assert "the Ray cluster's server (GCS) at " in server and "has not answered for" in server
    assert "rank is there: False" in said and "errors are printed at once: True" in said
