"""Claim: every language model and encoder of transformers is cut exactly or rejected by name.

Run with `python -m benchmarks.families --json`.

Each class gets a tiny configuration derived from its own defaults, and runs in training mode
through raymm's own probe, stages and executor, as one stage and as two: loss and every gradient
must agree. Outcomes of a class:

- ``exact``: the loss and all gradients agree, each to 1e-5 of the gradient's norm;
- ``refused``: raymm reports why the class cannot be cut;
- ``unclear``: an error that is not raymm's own, a timeout, or no configuration;
- ``wrong``: the numbers differ;
- ``not_applicable``: transformers itself cannot run it here, and raises an error.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from benchmarks.shared.common import console, emit, machine, origin, parser
from benchmarks.shared.family_check import (
    EXACT,
    NOT_APPLICABLE,
    REFUSED,
    UNCLEAR,
    WRONG,
    Outcome,
    check,
)
from benchmarks.shared.family_classes import ENCODER, LANGUAGE, Family, encoders, language_models
from raymm.files.run_files import write_whole

TIMEOUT_SECONDS = 120
RESULTS = (EXACT, REFUSED, UNCLEAR, WRONG, NOT_APPLICABLE)
NOT_TRIED = "not_tried"
# Classes with unusual features that also run fast; used by a test.
QUICK = {
    LANGUAGE: (
        "GPT2LMHeadModel",  # dropout, tied embeddings
        "OPTForCausalLM",  # embeddings narrower than blocks
        "Qwen3MoeForCausalLM",  # mixture of experts
        "Gemma3ForCausalLM",  # two kinds of layers
        "RoFormerForCausalLM",  # frozen table of positions, read by every block
        "OpenAIGPTLMHeadModel",  # blocks return lists; weights from the constructor only
    ),
    ENCODER: (
        "BeitModel",  # drop path
        "DINOv3ViTModel",  # rescaled rotary tables
        "Wav2Vec2Model",  # layer drop, weight norm, masked spans
        "ConvNextModel",  # stages, feature maps
        "Llama4VisionModel",  # a feed-forward width that depends on other sizes; other names
    ),
}


class _Running(NamedTuple):
    process: Any
    family: Family
    deadline: float


def main() -> None:
    options = class_parser(__doc__.splitlines()[0])
    options.add_argument("--kind", choices=("language", "encoder"), help="run only this kind")
    options.add_argument("--quick", action="store_true", help="run the classes of the test")
    arguments = options.parse_args()
    families = {"language": language_models(), "encoder": encoders()}
    every = [family for of_kind in families.values() for family in of_kind]
    names = arguments.only or [n for of_kind in QUICK.values() for n in of_kind if arguments.quick]
    run(every, named(families.get(arguments.kind, every), names), arguments)


def class_parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options of :func:`run`."""
    options = parser(description)
    options.add_argument("--only", nargs="+", metavar="NAME", help="run only these classes")
    options.add_argument("--results", type=Path, metavar="FILE",
                         help="JSON file of all classes; those with a result are not run again "
                         "unless --only names them")  # fmt: skip
    options.add_argument("--eval", action="store_true", help="run in evaluation mode")
    options.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds per class")
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return options


def run(
    every: list[Family], chosen: list[Family], options: argparse.Namespace,
    of: Callable[..., Outcome] = check,
) -> None:  # fmt: skip
    """Check classes; write each outcome to the results file as soon as it is known.

    Args:
        every: all classes; those that no run has tried are in the result as ``not_tried``.
        chosen: the classes to check, less those with a result in the file.
        options: of :func:`class_parser`.
        of: check of one class.
    """
    out, file = console(), options.results
    before = json.loads(file.read_text()) if file and file.exists() else {"runs": [], "classes": {}}
    runs = before["runs"]
    untried = {"kind": "", "result": NOT_TRIED}
    classes = {f.name: before["classes"].get(f.name, untried | {"kind": f.kind}) for f in every}
    if not options.only:
        chosen = [family for family in chosen if classes[family.name]["result"] == NOT_TRIED]
    if chosen:
        runs.append(origin() | {"machine": machine()})
    result = summary(classes, runs)
    for number, (family, outcome, seconds) in enumerate(outcomes(chosen, options, of), 1):
        classes[family.name] = {
            "kind": family.kind, "result": outcome.result, "sentence": outcome.sentence,
            "seconds": round(seconds, 1), "run": len(runs) - 1,
        }
        result = summary(classes, runs)
        if file:
            write_whole(file, json.dumps(result, indent=1) + "\n")
        out.print(
            f"{number:4}/{len(chosen)} {seconds:6.1f} s  {family.name}: {outcome.result}"
            f"{'  ' + outcome.sentence if outcome.sentence else ''}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    for kind, counts in result["counts"].items():
        out.print(f"{kind}s: " + ", ".join(f"{number} {r}" for r, number in counts.items()))
    emit(result, options.json)


def summary(classes: dict[str, dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return classes and runs with the number of classes per result, in total and per kind."""
    found = Counter((one["kind"], one["result"]) for one in classes.values())
    kinds = dict.fromkeys(one["kind"] for one in classes.values())
    counts = {kind: {r: found[kind, r] for r in (*RESULTS, NOT_TRIED)} for kind in kinds}
    total = {r: sum(of_kind[r] for of_kind in counts.values()) for r in (*RESULTS, NOT_TRIED)}
    return {**total, "counts": counts, "runs": runs, "classes": classes}


def named(families: list[Family], names: Iterable[str]) -> list[Family]:
    """Return the families with these names, or all if there are none.

    Raises:
        SystemExit: a name is not that of a class.
    """
    wanted = set(names)
    if unknown := wanted - {family.name for family in families}:
        raise SystemExit(f"unknown class: {', '.join(sorted(unknown))}")
    return [family for family in families if not wanted or family.name in wanted]


def outcomes(
    families: Iterable[Family], options: argparse.Namespace,
    of: Callable[..., Outcome] = check,
) -> Iterable[tuple[Family, Outcome, float]]:  # fmt: skip
    """Yield the outcome of each class, and its seconds, in order of completion.

    Each class runs in a separate process, so that a crash or an endless forward ends only that
    process.

    Args:
        options: ``timeout`` (seconds), ``workers``; ``eval``, without random numbers.
    """
    forking = multiprocessing.get_context("fork")  # transformers is imported once
    waiting = list(reversed(list(families)))
    running: dict[Connection, _Running] = {}
    while waiting or running:
        while waiting and len(running) < options.workers:
            family = waiting.pop()
            receiver, sender = forking.Pipe(duplex=False)
            process = forking.Process(
                target=_work, args=(sender, family, options.eval, of), daemon=True
            )
            process.start()
            sender.close()
            running[receiver] = _Running(process, family, time.monotonic() + options.timeout)
        ready = set(wait(list(running), timeout=1))
        for receiver, (process, family, deadline) in list(running.items()):
            now = time.monotonic()
            if receiver in ready:
                outcome = _received(receiver)
            elif now > deadline:
                outcome = Outcome(UNCLEAR, f"no result after {options.timeout} s")
            else:
                continue
            process.kill()
            process.join()
            receiver.close()
            del running[receiver]
            yield family, outcome, now - deadline + options.timeout


def _received(receiver: Connection) -> Outcome:
    try:
        return receiver.recv()
    except EOFError:
        return Outcome(UNCLEAR, "its process died")


def _work(
    sender: Connection, family: Family, evaluate: bool, of: Callable[..., Outcome]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    faulthandler.register(signal.SIGUSR1)
    sender.send(of(family, training=not evaluate))


if __name__ == "__main__":
    main()
