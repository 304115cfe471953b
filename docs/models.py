"""Generator of the page of checked model classes, from the results files of two benchmarks:

    python -m benchmarks.vlm_matrix --results benchmarks/log/vlm_matrix.json
    python -m benchmarks.families --results benchmarks/log/families.json
"""

import json
from pathlib import Path
from typing import Any

LOG = Path(__file__).resolve().parent.parent / "benchmarks" / "log"
# Title of a table, and the benchmark that fills it.
TABLES = (
    ("Vision- and audio-language models", "vlm_matrix"),
    ("Language models and encoders", "families"),
)
# Result of a benchmark: text on the page, in the order of the page.
RESULTS = {
    "exact": "exact", "refused": "rejected", "wrong": "**wrong**", "unclear": "not determined",
    "not_applicable": "cannot run in transformers", "not_tried": "not tried",
}  # fmt: skip
INTRODUCTION = """# Checked model classes

raymm has no list of supported models: any class of transformers with a list of blocks is trained
as one process trains it, or rejected by name before anything starts. This page lists the classes of
transformers, each checked with a tiny configuration. *Exact* means that the loss and every
gradient of the class in several stages equal those of its forward in one process, to 1e-5 of the
gradient's norm. `python -m benchmarks.vlm_matrix --only CLASS` and
`python -m benchmarks.families --only CLASS` check any class.
"""


def models_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([INTRODUCTION, *(_section(*table) for table in TABLES)])


def _section(title: str, benchmark: str) -> str:
    recorded = json.loads((LOG / f"{benchmark}.json").read_text())
    by_result: dict[str, dict[str, Any]] = {result: {} for result in RESULTS}
    for name, one in sorted(recorded["classes"].items()):
        by_result[one["result"]][name] = one
    untried = by_result.pop("not_tried")
    total = len(recorded["classes"])
    counts = ", ".join(f"{len(by_result[r])} {RESULTS[r]}" for r in by_result if by_result[r])
    runs = "".join(
        _row(number, *_origin(run), sum(
            one.get("run") == number - 1 for one in recorded["classes"].values()
        ))
        for number, run in enumerate(recorded["runs"], 1)
    )  # fmt: skip
    rows = "".join(
        _row(f"`{name}`", _text(one), one["run"] + 1)
        for classes in by_result.values() for name, one in classes.items()
    )  # fmt: skip
    not_tried = f"\nNot tried: {', '.join(f'`{name}`' for name in untried)}.\n" if untried else ""
    return (
        f"## {title}\n\n{total - len(untried)} of {total} classes were tried: {counts}.\n\n"
        f"{_head('run', 'command', 'date', 'commit', 'machine', 'classes')}{runs}\n"
        f"{_head('class', 'result', 'run')}{rows}{not_tried}"
    )


def _origin(run: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return command, date, commit and machine of a run."""
    machine, versions = run["machine"], run["machine"]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    computer = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average_1min']}"
    return (
        f"`{run['command']}`", machine["date"][:10], run["commit"] or "not recorded",
        f"{computer}; {packages}",
    )  # fmt: skip


def _text(one: dict[str, Any]) -> str:
    """Return the result of a class as a cell."""
    text = " ".join(one["sentence"].split())
    for character in "|<*_":
        text = text.replace(character, f"\\{character}")
    return f"{RESULTS[one['result']]}: {text}" if text else RESULTS[one["result"]]


def _head(*cells: str) -> str:
    return _row(*cells) + _row(*["---"] * len(cells))


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"
