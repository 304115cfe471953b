"""Generator of the page of checked model classes, from the JSON that two benchmarks print:

    python -m benchmarks.vlm_matrix --json --only CLASS ... > benchmarks/log/vlm_matrix.json
    python -m benchmarks.families --json --only CLASS ... > benchmarks/log/families.json
"""

import json
from pathlib import Path
from typing import Any

LOG = Path(__file__).resolve().parent.parent / "benchmarks" / "log"
# Title of a table, the file with its results, and the command that prints them.
TABLES = (
    ("Vision- and audio-language models", "vlm_matrix.json", "benchmarks.vlm_matrix"),
    ("Language models and encoders", "families.json", "benchmarks.families"),
)
# Outcome of a benchmark: text on the page.
OUTCOMES = {
    "exact": "exact", "refused": "rejected", "wrong": "**wrong**", "unclear": "not determined",
    "not_applicable": "does not run in transformers",
}
INTRODUCTION = """# Checked model classes

raymm has no list of supported models: any class of transformers with a list of blocks is trained
as one process trains it, or rejected by name before anything starts. This page lists classes of
common models, each checked with a tiny configuration. *Exact* means that the loss and every
gradient of the class in several stages equal those of its forward in one process, to 1e-5 of the
gradient's norm. [The results](../benchmarks/RESULTS.md#classes-layouts-and-options) count all
classes.
"""


def models_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([INTRODUCTION, *(_table(*table) for table in TABLES)])


def _table(title: str, file: str, module: str) -> str:
    result = json.loads((LOG / file).read_text())
    versions, date = result["machine"]["versions"], result["machine"]["date"][:10]
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in sorted(outcomes(result).items()))
    return (
        f"## {title}\n\nChecked on {date} with transformers {versions['transformers']} and torch "
        f"{versions['torch']}. `python -m {module} --only CLASS` checks any class.\n\n"
        f"| class | result |\n| --- | --- |\n{rows}\n"
    )


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    """Return the text on the page for every class in the result of a benchmark."""
    texts = {}
    for outcome, text in OUTCOMES.items():
        names = result["classes"][outcome]
        for name in names:
            reason = names[name] if isinstance(names, dict) else ""
            texts[name] = f"{text}: {_escaped(reason)}" if reason else text
    return texts


def _escaped(text: str) -> str:
    """Return a message as a cell of a table."""
    for character in "|<*_":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
