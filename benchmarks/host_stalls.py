"""Claim: the host hardly ever waits for the device within a training step.

Run with `python -m benchmarks.host_stalls --json`.

Full steps (forwards, backwards, messages, clipping, AdamW) of a tiny vision-language model run
through a rank's actor, on a CPU that pretends to be a GPU. Waits are counted by CUDA's rules, per
file and line. Losses and norms are compared with those on the CPU. All numbers are the largest of
any rank's third step.

- `waits_per_step`: waits from the first instruction to the last one, over all cases;
- `waits_at_start`: waits from the call to the first instruction, before anything is issued;
- `waits_at_end`: waits from the last instruction to the return of the step. The device is idle from
  the last of them until the next step issues its first kernel;
- `cases`: these three numbers, `waits_by_place` of each part, `max_relative_error` and `bound` of
  each case.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from rich.table import Table

from benchmarks.shared import common

# Ranks by case of benchmarks.devices.pretended_gpu.steps, whose libraries are not imported here.
RANKS = {
    "fp32": 1, "bf16": 1, "frozen": 1, "plain": 1, "packed": 1, "two ranks": 2,
    "two ranks, plain": 2,
}  # fmt: skip
# Names of the numbers by part of a step.
FIGURES = {"start": "waits_at_start", "within": "waits_per_step", "end": "waits_at_end"}
BOUNDS = {"fp32": 1e-5, "packed": 1e-5, "two ranks, plain": 1e-5}
BF16_BOUND = 1e-3
SECONDS = 240


def measure(case: str) -> dict[str, Any]:
    """Run a case's ranks, each in a separate process.

    Raises:
        RuntimeError: a rank failed.
    """
    port = _two_free_ports()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.devices.pretended_gpu.case", case, str(rank),
             str(port)],
            cwd=common.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS[case])
    ]  # fmt: skip
    outputs = [process.communicate(timeout=SECONDS) for process in ranks]
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{case}:\n{errors}")
    results = [json.loads(text.splitlines()[-1]) for text, _ in outputs]
    most = {
        part: max((result["waits"][part] for result in results), key=lambda at: sum(at.values()))
        for part in FIGURES
    }
    return {
        "case": case,
        **{figure: sum(most[part].values()) for part, figure in FIGURES.items()},
        "waits_by_place": most,
        "max_relative_error": max(result["max_relative_error"] for result in results),
        "bound": BOUNDS.get(case, BF16_BOUND),
    }


def _two_free_ports() -> int:
    """Return the first of two adjacent free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


def main() -> int:
    """Run all cases, print the table, then the result line."""
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--cases", nargs="+", choices=RANKS, default=list(RANKS))
    chosen = options.parse_args()
    cases = [measure(case) for case in chosen.cases]
    table = Table(title="waits of the host in a step")
    for heading in ("case", "at its start", "within", "at its end", "error", "where"):
        table.add_column(heading)
    for case in cases:
        where = "\n".join(
            f"{count} {place}" for part in case["waits_by_place"].values()
            for place, count in part.items()
        )
        numbers = (str(case[figure]) for figure in FIGURES.values())
        table.add_row(case["case"], *numbers, f"{case['max_relative_error']:.1e}", where)
    common.console().print(table)
    result = {
        "benchmark": "host_stalls",
        **{figure: max(case[figure] for case in cases) for figure in FIGURES.values()},
        "cases": cases,
        "machine": common.machine(),
    }
    common.emit(result, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
