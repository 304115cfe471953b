"""Command ``python ray_command.py start ...``: Ray's command with forked workers.

Nodes fork their workers from running servers (:mod:`raymm.runtime.embedded.forked_workers`),
because importing torch in every worker takes longer than the runs on the rig.
"""

import sys

from ray.scripts.scripts import main

from raymm.runtime.embedded.forked_workers import forked_workers

if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    with forked_workers():
        main()
