"""Generator of the page of checked model classes, from the results files of two benchmarks:

    python -m benchmarks.vlm_matrix --results benchmarks/log/vlm_matrix.json
    python -m benchmarks.families --results benchmarks/log/families.json
"""

import html
import json
import re
from typing import Any

from benchmarks.results import LOG, describe_run

# Title of a section, and the benchmark with its results.
SECTIONS = {
    "Vision- and audio-language models": "vlm_matrix", "Language models and encoders": "families",
}  # fmt: skip
# Result of a benchmark: text on the page, in the order of the page.
RESULTS = {
    "exact": "exact", "refused": "rejected", "wrong": "wrong", "unclear": "not determined",
    "not_applicable": "cannot run in transformers here",
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
    return "\n\n".join([INTRODUCTION, *(_section(*one) for one in SECTIONS.items())]) + "\n"


def _section(title: str, benchmark: str) -> str:
    recorded = json.loads((LOG / f"{benchmark}.json").read_text())
    classes = recorded["classes"]
    untried = [f"`{name}`" for name, one in classes.items() if one["result"] == "not_tried"]
    text = [f"## {title}", f"{len(classes) - len(untried)} of {len(classes)} classes were tried."]
    for number, run in enumerate(recorded["runs"]):
        of_run = {name: one for name, one in classes.items() if one.get("run") == number}
        text += [f"### Run {number + 1}: {len(of_run)} classes", f"{describe_run(run)}."]
        for result, label in RESULTS.items():
            found = {name: one for name, one in of_run.items() if one["result"] == result}
            if found:
                text += [f"**{len(found)} {label}:**", _classes(found)]
    if untried:
        text += [f"### Not tried: {len(untried)} classes", ", ".join(untried)]
    return "\n\n".join(text)


def _classes(found: dict[str, Any]) -> str:
    """Return names separated by commas, or a list if a class that is not exact has a message."""
    lines = []
    for name, one in sorted(found.items()):
        text = "" if one["result"] == "exact" else one["sentence"].removeprefix(f"{name} ")
        lines.append(f"`{name}` {_escaped(text)}".strip())
    single = all(line.endswith("`") for line in lines)
    return ", ".join(lines) if single else "\n".join(f"- {line}" for line in lines)


def _escaped(text: str) -> str:
    """Return a message in Markdown."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\*_`\[])", r"\\\1", text)
