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
import multiprocessing
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from benchmarks._common import console, emit, machine, parser
from benchmarks._family_check import (
    EXACT,
    NOT_APPLICABLE,
    REFUSED,
    UNCLEAR,
    WRONG,
    Outcome,
    check,
)
from benchmarks._family_classes import ENCODER, LANGUAGE, Family, encoders, language_models

TIMEOUT_SECONDS = 120
RESULTS = (EXACT, REFUSED, UNCLEAR, WRONG, NOT_APPLICABLE)
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
    arguments = _arguments()
    out = console()
    out.print("reading transformers' registries")
    families = chosen(arguments)
    found: dict[Family, Outcome] = {}
    started = time.monotonic()
    for family, outcome, seconds in outcomes(families, arguments):
        found[family] = outcome
        out.print(
            f"{len(found):4}/{len(families)} {seconds:6.1f} s  {family.name}: {outcome.result}"
            f"{'  ' + outcome.sentence if outcome.sentence else ''}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    result = summary(found)
    result |= {"seconds": round(time.monotonic() - started, 1), "machine": machine()}
    for kind, counts in result["counts"].items():
        out.print(f"{kind}s: " + ", ".join(f"{counts[r]} {r}" for r in RESULTS))
    emit(result, arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", metavar="NAME", help="run only these classes")
    options.add_argument("--kind", choices=("language", "encoder"), help="run only this kind")
    options.add_argument("--quick", action="store_true", help="run the classes of the test")
    options.add_argument("--eval", action="store_true", help="run in evaluation mode")
    options.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds per class")
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    return options.parse_args()


def chosen(arguments: argparse.Namespace) -> list[Family]:
    """Return the selected classes."""
    families: list[Family] = []
    if arguments.kind != "encoder":
        families += language_models()
    if arguments.kind != "language":
        families += encoders()
    quick = [name for names in QUICK.values() for name in names] if arguments.quick else ()
    return named(families, arguments.only or quick)


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
    """Yield the outcome of each class in order of completion.

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


def summary(found: dict[Family, Outcome]) -> dict[str, Any]:
    """Return counts per kind and in total, and the classes of every outcome with their messages."""
    counts = {
        kind: {r: Counter(o.result for f, o in found.items() if f.kind == kind)[r] for r in RESULTS}
        for kind in (LANGUAGE, ENCODER)
    }
    total = {r: sum(of_kind[r] for of_kind in counts.values()) for r in RESULTS}
    names = {
        EXACT: sorted(f.name for f, o in found.items() if o.result == EXACT),
        **{
            r: {f.name: o.sentence for f, o in sorted(found.items(), key=lambda p: p[0].name)
                if o.result == r}
            for r in RESULTS[1:]
        },
    }  # fmt: skip
    return {**total, "counts": counts, "classes": names}


if __name__ == "__main__":
    main()
