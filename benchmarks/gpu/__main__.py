"""Runs sections on this machine's GPU, writes the results and prints them as tables.

    make gpu PYTHON=python3
    make gpu-more PYTHON=python3                 # the sections of the second run
    python -m benchmarks.gpu --sections attention green_contexts
    python -m benchmarks.gpu --device cpu        # tries the code, with tiny sizes

Needs torch, transformers, triton and numpy. Exits with 1 where a part failed, with 4 where there
is no GPU, with 5 where a trial on a CPU is not possible with the installed versions.
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

# Of the whole run, with starts and ends of processes: under ten minutes with some to spare.
SECONDS = 530.0
NO_DEVICE_TEXT = "there is no CUDA device that torch can use: nothing was measured"
# Seconds between two looks at what there is, which are written to the file of results.
WRITE_S = 3.0
# Exit code where Triton's interpreter cannot run with the installed numpy.
NO_INTERPRETER = 5


def groups(sections: Sequence[Section]) -> list[list[Section]]:
    """Sections in the order in which they run, those that run at the same time together."""
    found: list[list[Section]] = []
    for section in sections:
        if section.beside and found:
            found[-1].append(section)
        else:
            found.append([section])
    return found


def budgets(rest: Sequence[Sequence[Section]], left: float) -> list[float]:
    """Seconds for each section of the first group: its own and what earlier ones left over; less,
    in proportion, where not even that is left.

    Args:
        rest: groups that are still to run, the next one first.
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
    """Whether there is a CUDA driver; where there is none, nothing need be imported to say so."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def no_interpreter() -> str:
    """Why Triton's interpreter, which stands for a GPU on a CPU, does not work with the installed
    versions; empty where it does."""
    triton, numpy = (Version(version(name)) for name in ("triton", "numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        return (
            f"triton {triton}'s interpreter fails with numpy {numpy}: nothing was tried. Install "
            "numpy<2.4 or triton>=3.7; kernels that are compiled for a GPU are not concerned"
        )
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--device", choices=KINDS, default="cuda", help="cpu only tries the code")
    parser.add_argument("--sections", nargs="+", choices=names, default=[], metavar="SECTION")
    parser.add_argument("--more", action="store_true", help="the second run instead of the first")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--output", type=Path, help="file of results; default by the device's name")
    options = parser.parse_args(arguments)
    # The first always: it names the machine.
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
