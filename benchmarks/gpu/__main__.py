"""Claim: kernels, streams and steps are correct and fast on this machine's GPU.

    make gpu PYTHON=python3
    make gpu-more PYTHON=python3                 # the sections of the second run
    python -m benchmarks.gpu --sections attention green_contexts
    python -m benchmarks.gpu --device cpu        # tries the code, with tiny sizes

Runs sections, writes the results and prints them as tables. Needs torch, transformers, triton and
numpy. Exits with 1 if a part failed, with 4 if there is no GPU, with 5 if a trial on a CPU is not
possible with the installed versions.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from benchmarks.gpu import report
from benchmarks.gpu.processes import NO_DEVICE, ready_server, run_together
from benchmarks.gpu.sections import KINDS, SECTIONS, Section

# Time limit of the whole run, including process starts and ends: under ten minutes with a margin.
SECONDS = 530.0
NO_DEVICE_TEXT = "there is no CUDA device that torch can use: nothing was measured"
# Seconds between two writes of the results so far.
WRITE_S = 3.0
# Exit code if Triton's interpreter cannot run with the installed numpy.
NO_INTERPRETER = 5


def groups(sections: Sequence[Section]) -> list[list[Section]]:
    """Group sections that run at the same time, in order."""
    found: list[list[Section]] = []
    for section in sections:
        if section.beside and found:
            found[-1].append(section)
        else:
            found.append([section])
    return found


def budgets(rest: Sequence[Sequence[Section]], left: float) -> list[float]:
    """Return the seconds of each section of the first group.

    Each gets its own time and the time that earlier ones left over, or proportionally less if the
    remaining time is short.

    Args:
        rest: remaining groups, the next one first.
        left: seconds for all of them.
    """
    planned = sum(max(section.seconds for section in group) for group in rest)
    longest = max(section.seconds for section in rest[0])
    spare = left - planned
    if spare < 0:
        return [section.seconds * max(left, 0.0) / planned for section in rest[0]]
    return [section.seconds + spare if section.seconds == longest else section.seconds
            for section in rest[0]]  # fmt: skip


def has_driver() -> bool:
    """Return True if there is a CUDA driver, without importing torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def no_interpreter() -> str:
    """Return why Triton's interpreter does not work with the installed versions, or "".

    The interpreter replaces a GPU in trials on a CPU.
    """
    triton, numpy = (Version(version(name)) for name in ("triton", "numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        return (
            f"triton {triton}'s interpreter fails with numpy {numpy}: nothing was tried. Install "
            "numpy<2.4 or triton>=3.7; kernels that are compiled for a GPU are not concerned"
        )
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--device", choices=KINDS, default="cuda", help="cpu only tries the code")
    parser.add_argument("--sections", nargs="+", choices=names, default=[], metavar="SECTION")
    parser.add_argument("--more", action="store_true", help="run the second set of sections")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit in seconds")
    parser.add_argument("--output", type=Path, help="results file; by default named by device")
    options = parser.parse_args(arguments)
    # The first section always runs: it names the machine.
    wanted = options.sections or [s.name for s in SECTIONS if s.more == options.more]
    chosen = [s for s in SECTIONS if s is SECTIONS[0] or s.name in wanted]
    if options.device == "cuda" and not has_driver():
        print(NO_DEVICE_TEXT, file=sys.stderr)
        return NO_DEVICE
    if options.device == "cpu" and (reason := no_interpreter()):
        print(reason, file=sys.stderr)
        return NO_INTERPRETER
    started, begin = time.time(), time.monotonic()
    server = ready_server(options.device)
    path, written = options.output, 0.0
    with tempfile.TemporaryDirectory(prefix="raymm-gpu-") as name:
        folder = Path(name)

        def save(now: bool = False) -> None:
            nonlocal path, written
            if now or time.monotonic() - written > WRITE_S:
                found = report.gather(chosen, folder)
                default = report.RESULTS / report.file_name(found, options.device)
                report.write(path or default, found, started)
                written = time.monotonic()

        rest = groups(chosen)
        while rest:
            now = time.monotonic()
            seconds = budgets(rest, begin + options.seconds - now)
            texts = [f"{s.name} ({t:.0f} s)" for s, t in zip(rest[0], seconds, strict=True)]
            print(f"[{now - begin:5.0f} s] {', '.join(texts)}", flush=True)
            deadlines = [now + each for each in seconds]
            if not run_together(rest[0], server, options.device, folder, deadlines, save):
                print(NO_DEVICE_TEXT, file=sys.stderr)
                return NO_DEVICE
            rest = rest[1:]
        save(now=True)
        found = report.gather(chosen, folder)
    print(report.tables(found))
    path = path or report.RESULTS / report.file_name(found, options.device)
    print(f"\n{path}: {time.monotonic() - begin:.0f} s")
    return int(any(section["errors"] for section in found.values()))


if __name__ == "__main__":
    sys.exit(main())
