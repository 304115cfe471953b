"""Process of a case of :mod:`benchmarks.host_stalls`.

torch is imported after the library of the pretended GPU.
"""

from __future__ import annotations

import json
import sys

from benchmarks.devices.pretended_gpu.library import load


def main() -> int:
    """Run one rank of a case. Arguments: case, rank, and the port of the local rendezvous."""
    name, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    load()
    from benchmarks.devices.pretended_gpu.steps import run

    print(json.dumps(run(name, rank, port)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
