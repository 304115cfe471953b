"""Claim: every vision, audio and omni model of transformers is split exactly or rejected by name.

Run with `python -m benchmarks.vlm_matrix --json`.

Each class gets a tiny configuration derived from its own defaults, and three microbatches: an item
of a different size in each row, text only, and two items in one of two rows. Its towers and its
language model run in two stages each, as on ranks, and are compared with the class's own forward in
one process: loss, every gradient, the losses of three AdamW steps, and the folder that is saved
from the stages and loaded again. A bf16 folder is exported too: its files must have the same bytes,
and so must a second export of trained weights. Outcomes are those of :mod:`benchmarks.families`.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from benchmarks._common import console, emit, machine, parser
from benchmarks._family_check import EXACT, Outcome
from benchmarks._family_classes import Family, _pairs
from benchmarks._vlm_check import SEVERAL, check
from benchmarks.families import RESULTS, TIMEOUT_SECONDS, named, outcomes

KIND = "whole model"


def whole_models() -> list[Family]:
    """Return every class of transformers' registries for text with images, or with any modality."""
    found: dict[type[PreTrainedModel], Family] = {}
    for registry in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        for config, model in _pairs(registry):
            found.setdefault(model, Family(KIND, model, model.config_class or config))
    return sorted(found.values(), key=lambda family: family.name)


def main() -> None:
    arguments = _arguments()
    out = console()
    families = named(whole_models(), arguments.only or ())
    found: dict[Family, Outcome] = {}
    started = time.monotonic()
    for family, outcome, seconds in outcomes(families, arguments, check):
        found[family] = outcome
        out.print(
            f"{len(found):4}/{len(families)} {seconds:6.1f} s  {family.name}: {outcome.result}"
            f"{'  ' + outcome.sentence if outcome.sentence else ''}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    result = summary(found)
    result |= {"seconds": round(time.monotonic() - started, 1), "machine": machine()}
    out.print(", ".join(f"{result[r]} {r}" for r in RESULTS))
    emit(result, arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs="+", metavar="NAME", help="run only these classes")
    options.add_argument("--eval", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds per class")
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return options.parse_args()


def summary(found: dict[Family, Outcome]) -> dict[str, Any]:
    """Return the number of classes per outcome, and their names with messages."""
    listed = sorted((family.name, outcome) for family, outcome in found.items())
    counts = {r: sum(o.result == r for _, o in listed) for r in RESULTS}
    names: dict[str, Any] = {
        r: {name: o.sentence for name, o in listed if o.result == r} for r in RESULTS
    }
    names[SEVERAL] = [name for name, sentence in names[EXACT].items() if sentence == SEVERAL]
    names[EXACT] = list(names[EXACT])
    return {**counts, "classes": names}


if __name__ == "__main__":
    main()
