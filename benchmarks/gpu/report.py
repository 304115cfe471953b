"""Results as an atomically written file, and as tables of plain text."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import read_parts
from benchmarks.gpu.sections import Section

RESULTS = Path(__file__).resolve().parent.parent / "results"
# Columns of a table; further figures are only in the file.
MOST_COLUMNS = 16
MOST_CHARACTERS = 28


def gather(sections: Sequence[Section], folder: Path) -> dict[str, Any]:
    """Return the results of all sections so far: parts, and number of failures, per section."""
    found: dict[str, Any] = {}
    for section in sections:
        parts: dict[str, Any] = {}
        for number in range(section.shares):
            parts |= read_parts(folder / f"{section.name}-{number}.jsonl")
        states = [part["state"] for part in parts.values()]
        found[section.name] = {
            "ok": states.count("ok"),
            "errors": sum(state in ("error", "begun") for state in states),
            "not_run": states.count("not_run"),
            "parts": parts,
        }
        if not parts:
            found[section.name] |= {"not_run": 1, "reason": "no process of it has begun a part"}
    return found


def file_name(results: Mapping[str, Any], kind: str) -> str:
    """Return a file name for the device, such as ``nvidia-h100-80gb-hbm3.json``."""
    parts = results.get("machine", {}).get("parts", {})
    name = parts.get("device", {}).get("name") or kind
    return re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-") + ".json"


def write(path: Path, results: Mapping[str, Any], started: float) -> None:
    """Replace the results file atomically.

    Sections that have not run keep the results of an earlier run on this machine.

    Args:
        path: results file; its folder is created.
        started: start of the run, ``time.time()``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
    before = json.loads(path.read_text())["sections"] if path.exists() else {}
    sections = {name: {"started": at, **section} for name, section in results.items()}
    whole = {"seconds": round(time.time() - started, 1), "sections": {**before, **sections}}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    os.replace(partial, path)


def tables(results: Mapping[str, Any]) -> str:
    """Return a table per section, with a line per part and a column per figure, then all failures.
    """
    lines: list[str] = []
    for name, section in results.items():
        counts = f"{section['ok']} ok, {section['errors']} errors, {section['not_run']} not run"
        lines += ["", f"== {name}: {counts}"]
        rows = {part: _figures(row) for part, row in section["parts"].items()}
        groups: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
        for part, row in rows.items():
            groups.setdefault(tuple(row)[:MOST_COLUMNS], {})[part] = row
        for columns, group in groups.items():
            lines += _aligned([
                ("part", *columns), *((part, *map(row.get, columns)) for part, row in group.items())
            ])  # fmt: skip
    failures = [
        f"{name} / {part}: {row.get('error') or row.get('reason') or 'did not end'}"
        for name, section in results.items()
        for part, row in section["parts"].items() if row["state"] != "ok"
    ]
    return "\n".join([*lines, "", *(f"! {failure}" for failure in failures)])


def _figures(row: Mapping[str, Any]) -> dict[str, str]:
    if row["state"] != "ok":
        return {"state": row["state"]}
    flat: dict[str, str] = {}
    for key, value in row.items():
        if key == "state":
            continue
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, figure in inner:
            if not isinstance(figure, list | dict):
                flat[f"{key}.{name}" if name else key] = str(figure)[:MOST_CHARACTERS]
    return flat


def _aligned(rows: Sequence[Sequence[Any]]) -> list[str]:
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]
