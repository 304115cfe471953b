"""``raymm trace``: summarise a run's last timeline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.table import Table

from raymm.errors import ConfigError, PlanError
from raymm.files.config_file import read_text
from raymm.files.field_errors import shown
from raymm.scheduler.graph.strict_json import json_value

# Maximum size of a timeline, which has a few steps.
MOST_TRACE_BYTES = 2**30


class _Event(BaseModel):
    """An event of Chrome's trace format, with the fields that are read."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    ph: str
    name: str
    pid: int
    tid: int = 0
    ts: float = 0.0
    dur: float = Field(default=0.0, ge=0)
    cat: str = ""
    args: dict[str, Any] = Field(default_factory=dict)


class _Trace(BaseModel):
    traceEvents: list[_Event]  # noqa: N815  the format's name


def add_trace_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``raymm trace``."""
    command.add_argument("run_folder", help="folder of a run (run.storage_path)")


def run_trace(args: argparse.Namespace) -> None:
    """Print the busy and waiting time of ranks. Raises ConfigError, which names the file, if the
    timeline is missing or invalid."""
    if not Path(args.run_folder).is_dir():
        raise ConfigError(f"run_folder is {args.run_folder!r}; there is no such folder")
    file = Path(args.run_folder) / "trace.json"
    if not file.exists():
        raise ConfigError(
            f"run_folder is {args.run_folder!r}; it has no trace.json, which a run writes when it "
            "ends; give the folder of a run that has ended"
        )
    Console().print(trace_table(file, read_events(file)))
    print(f"open {file} in Perfetto or chrome://tracing")


def read_events(file: Path) -> list[_Event]:
    """Return the events of a file. Raises ConfigError, which names the file and the invalid
    event."""
    text = read_text(file, "trace", MOST_TRACE_BYTES)
    try:
        return _Trace.model_validate(json_value(text, str(file))).traceEvents
    except PlanError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            f"{file} is not a timeline that raymm wrote: {where}: {first['msg']} (got "
            f"{shown(first['input'])})"
        ) from None


def trace_table(file: Path, events: list[_Event]) -> Table:
    """Return a table with a row per timeline and rank."""
    names = {e.pid: e.args.get("name", e.pid) for e in events if e.name == "process_name"}
    threads = {(e.pid, e.tid): e.args.get("name", e.tid) for e in events if e.name == "thread_name"}
    table = Table(title=str(file))
    for name in ("timeline", "rank", "busy ms", "waiting ms", "step ms", "bubble"):
        table.add_column(name, justify="left" if name in ("timeline", "rank") else "right")
    for (pid, tid), name in sorted(threads.items()):
        spans = [e for e in events if e.ph == "X" and e.pid == pid]
        end = max((e.ts + e.dur for e in spans), default=0) - min((e.ts for e in spans), default=0)
        thread_spans = [e for e in spans if e.tid == tid]
        busy = sum(e.dur for e in thread_spans if e.cat.startswith(("forward", "backward")))
        wait = sum(e.dur for e in thread_spans if e.cat == "recv")
        table.add_row(
            str(names.get(pid, pid)), str(name), f"{busy / 1e3:.1f}", f"{wait / 1e3:.1f}",
            f"{end / 1e3:.1f}", f"{1 - busy / end:.0%}" if end > 0 else "-",
        )
    return table
