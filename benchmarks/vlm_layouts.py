"""Claim: sharded layouts train vision-language and audio models exactly as one process does.

Run with `python -m benchmarks.vlm_layouts --json`.

Five classes (a vision-language model with positions in three dimensions, one whose features enter
several layers, a mixture of experts, one with bidirectional attention on images, an audio model)
under every layout, or others with ``--only``: loss, every gradient and parameters after three AdamW
steps equal those of the class's own forward in one process, or the layout is rejected by name.
Every process has all stages of its shard, so the comparison covers the work within a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.families import RESULTS
from benchmarks.shared.common import console, emit, machine, parser
from benchmarks.shared.family_check import EXACT, UNCLEAR, WRONG, Outcome
from benchmarks.shared.ranks import gloo_ranks
from benchmarks.shared.vlm_shares import Layout, outcome
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.runtime.specs import ParallelSpec

CLASSES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
)
PROCESSES = 2
# Displayed characters of a message.
_SHOWN = 300


def _both(**values: Any) -> dict[str, ParallelSpec]:
    return {"tower": ParallelSpec(**values), "llm": ParallelSpec(**values)}


_FSDP = {"tower": ParallelSpec(dp=2, sharding="fsdp")}
_LORA = {"language_model": LoraConfig(r=4)}
LAYOUTS: dict[str, Layout] = {
    "dp 2": Layout(_both(dp=2)),
    "pp 3": Layout({"llm": ParallelSpec(pp=3)}),
    "fsdp 2": Layout(_both(dp=2, sharding="fsdp")),
    "fsdp 2, pp 2": Layout(_both(dp=2, sharding="fsdp", pp=2)),
    "fsdp 2, tower frozen": Layout(
        _both(dp=2, sharding="fsdp"), {"train": {"tower": "frozen"}}
    ),
    "tp 2": Layout(_both(tp=2)),
    "tp 2, pp 2": Layout(_both(tp=2, pp=2)),
    "tp 2, lora": Layout(_both(tp=2), {"train": _LORA}),
    "cp 2": Layout({"llm": ParallelSpec(cp=2)}),
    "cp 2, pp 2, tower fsdp 2": Layout({
        "tower": ParallelSpec(dp=2, sharding="fsdp"), "llm": ParallelSpec(cp=2, pp=2),
    }),
    "packing": Layout(options={"packing": True}),
    "packing, fsdp 2, pp 2": Layout(_both(dp=2, sharding="fsdp", pp=2), {"packing": True}),
    "packing, cp 2": Layout({"llm": ParallelSpec(cp=2)}, {"packing": True}),
    "language model frozen, tp 2": Layout(_both(tp=2), {"train": {"language_model": "frozen"}}),
    # The experts of each layer are sharded; a class without experts is rejected.
    "ep 2": Layout(_FSDP | {"llm": ParallelSpec(dp=2, sharding="fsdp", ep=2)}),
    "ep 2, pp 2": Layout(_FSDP | {"llm": ParallelSpec(dp=2, sharding="fsdp", ep=2, pp=2)}),
}


def outcomes(classes: list[str], layouts: list[str]) -> Iterator[tuple[str, str, Outcome, float]]:
    """Yield class, layout, outcome and seconds."""
    waiting = [(name, layout) for name in classes for layout in layouts]
    while waiting:
        with gloo_ranks(PROCESSES) as ranks:
            while waiting:
                name, layout = waiting.pop(0)
                started = time.monotonic()
                try:
                    found = ranks.run(outcome, name=name, layout=LAYOUTS[layout])[0]
                except RuntimeError as error:
                    last = str(error).strip().splitlines()[-1]
                    yield name, layout, Outcome(UNCLEAR, last), time.monotonic() - started
                    break  # the other processes may be waiting for this one
                yield name, layout, found, time.monotonic() - started


def main() -> None:
    arguments = _arguments()
    out, started = console(), time.monotonic()
    found: dict[str, dict[str, Outcome]] = {}
    for name, layout, result, seconds in outcomes(arguments.only, arguments.layouts):
        found.setdefault(name, {})[layout] = result
        out.print(
            f"{seconds:6.1f} s  {name}, {layout}: {result.result}"
            f"{'  ' + result.sentence[:_SHOWN] if result.sentence else ''}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    every = [result for of_class in found.values() for result in of_class.values()]
    summary: dict[str, Any] = {r: sum(o.result == r for o in every) for r in RESULTS}
    summary["classes"] = {
        name: {
            layout: o.result if o.result == EXACT else f"{o.result}: {o.sentence}"
            for layout, o in of_class.items()
        } for name, of_class in found.items()
    }  # fmt: skip
    summary |= {"seconds": round(time.monotonic() - started, 1), "machine": machine()}
    out.print(", ".join(f"{summary[r]} {r}" for r in RESULTS))
    emit(summary, arguments.json)
    if summary[WRONG] or summary[UNCLEAR]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs="+", metavar="NAME", default=list(CLASSES),
                         help="run only these classes")  # fmt: skip
    options.add_argument("--layouts", nargs="+", metavar="NAME", default=list(LAYOUTS),
                         choices=list(LAYOUTS), help="run only these layouts")  # fmt: skip
    return options.parse_args()


if __name__ == "__main__":
    main()
