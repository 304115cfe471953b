"""Claim: an asynchronous checkpoint stops training for a fraction of a synchronous save.

Run with `python -m benchmarks.checkpoint_stall --json`.

A Llama of two stages trains on Ray actors and saves weights and AdamW moments, alternating between
:meth:`raymm.storage.checkpoint.CheckpointStore.save` and ``start``; both flush to disk and compute
checksums. All figures are medians over rounds: `stall_s` is the time without a running step,
`slower_s` the additional time of the steps during the write (beyond the median of steps without a
save), `committed_s` the time until the checkpoint is committed. The key `stall_ratio` is the
asynchronous stall over the synchronous one. `cost_ratio` also includes the slower steps: on a
machine whose cores the ranks keep busy, the write takes time from them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.shared import common
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.storage.checkpoint import CheckpointStore

ROWS, TOKENS, MICROBATCHES, STAGES = 1, 128, 2, 2
WARM_UP_STEPS = 3
LEAST_STEPS = 3  # after the start of a save


class Save(NamedTuple):
    """Seconds of one checkpoint.

    Attributes:
        stall: seconds without a running step.
        slower: additional seconds of the steps during the write.
        committed: seconds from the start to the commit.
    """

    stall: float
    slower: float
    committed: float


def build(hidden: int, layers: int) -> tuple[MultimodalModule, list[dict[str, Any]]]:
    """Return the model, and a step's microbatches."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=8192, tie_word_embeddings=False,
    )
    draw = torch.Generator().manual_seed(0)
    batch = []
    for _ in range(MICROBATCHES):
        ids = torch.randint(0, 8192, (ROWS, TOKENS), generator=draw)
        batch.append({"input_ids": ids, "labels": ids})
    return MultimodalModule({}, ModalityModule(config, seed=1)), batch


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def synchronous(store: CheckpointStore, parallel: ParallelModel) -> Save:
    """Save the current state synchronously."""
    seconds = timed(store.save, parallel, {})
    return Save(seconds, 0.0, seconds)


def asynchronous(
    store: CheckpointStore, parallel: ParallelModel, step: Callable[[], float],
    usual: float,
) -> Save:
    """Save the current state asynchronously, and run steps until it is committed.

    Args:
        step: runs one step and returns its seconds.
        usual: seconds of a step without a concurrent save.
    """
    start = time.perf_counter()
    stall = timed(store.start, parallel, {})
    beside = [step() for _ in range(LEAST_STEPS)]
    while (saved := store.ended()) is None:
        beside.append(step())
    # The commit happens between two polls; the store records its time.
    committed = min(saved.seconds + stall, time.perf_counter() - start)
    return Save(stall, sum(beside) - usual * len(beside), committed)


def measure(folder: Path, hidden: int, layers: int, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    model, batch = build(hidden, layers)
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=STAGES), MICROBATCHES).plan(model)
    saves: dict[str, list[Save]] = {"synchronous": [], "asynchronous": []}
    store = CheckpointStore(folder, keep=1)
    with common.local_ray(4), ParallelModel(model, plan) as parallel:
        def step() -> float:
            return timed(parallel.train_step, batch)

        for _ in range(WARM_UP_STEPS):
            step()
        plain = []
        for number in range(rounds + 1):
            seconds = [step() for _ in range(LEAST_STEPS)]
            behind = asynchronous(store, parallel, step, statistics.median(seconds))
            step()
            at_once = synchronous(store, parallel)
            if number:  # the first round warms up
                plain += seconds
                saves["asynchronous"].append(behind)
                saves["synchronous"].append(at_once)
        found = store.newest()
    assert found is not None
    nbytes = sum(file.size for file in found.manifest.files.values())
    result: dict[str, Any] = {"bytes": nbytes, "step_s": round(statistics.median(plain), 3)}
    for name, taken in saves.items():
        row = {
            f"{field}_s": round(statistics.median(getattr(save, field) for save in taken), 3)
            for field in Save._fields
        }
        row["gb_per_s_while_stopped"] = round(nbytes / row["stall_s"] / 1e9, 2)
        row["gb_per_s_to_disk"] = round(nbytes / row["committed_s"] / 1e9, 2)
        result[name] = row
    behind, at_once = result["asynchronous"], result["synchronous"]
    result["stall_ratio"] = round(behind["stall_s"] / at_once["stall_s"], 3)
    cost = behind["stall_s"] + max(0.0, behind["slower_s"])
    result["cost_ratio"] = round(cost / at_once["stall_s"], 3)
    return result


def main() -> None:
    parser = common.parser(str(__doc__).split("\n", 1)[0])
    parser.add_argument("--hidden", type=int, default=768, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args.hidden, args.layers, args.rounds)
    fields = list(found["synchronous"])
    table = Table("save", *fields, title=f"{found['bytes'] / 1e6:.0f} MB, a step {found['step_s']}")
    for name in ("synchronous", "asynchronous"):
        table.add_row(name, *(str(found[name][field]) for field in fields))
    common.console().print(table)
    common.emit({**found, "machine": common.machine()}, args.json)


if __name__ == "__main__":
    main()
