"""How long steps stop for a checkpoint: written at once, and behind them.

A Llama of two stages trains on Ray actors and saves all it has (weights and AdamW's moments), in
turns as :meth:`raymm.storage.checkpoint.CheckpointStore.save` and ``start`` do it, forced to disk
and with checksums either way. `stall_s` is how long no step runs for a save, `slower_s` by how much
longer the steps took that ran while it was written (their time beyond the median of steps without),
`committed_s` how long it was until the checkpoint counted, all medians over rounds. The key
`stall_ratio` is the asynchronous stall over the synchronous one, `cost_ratio` the same of stall and
slower steps together: on a machine whose cores the ranks keep busy, writing has to come from
somewhere.

    python -m benchmarks.checkpoint_stall --json
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

from benchmarks import _common
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.pipelined import MultimodalParallelModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.storage.checkpoint import CheckpointStore

ROWS, TOKENS, MICROBATCHES, STAGES = 1, 128, 2, 2
WARM_UP_STEPS = 3
LEAST_STEPS = 3  # after a save that was started


class Save(NamedTuple):
    """What one checkpoint took, in seconds.

    Attributes:
        stall: no step ran.
        slower: what steps beside it took more than others.
        committed: from its beginning until it counted.
    """

    stall: float
    slower: float
    committed: float


def build(hidden: int, layers: int) -> tuple[MultimodalModule, list[dict[str, Any]]]:
    """The model, and a step's microbatches."""
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
    """Seconds that something takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def synchronous(store: CheckpointStore, parallel: MultimodalParallelModule) -> Save:
    """A save of the current state, at once."""
    seconds = timed(store.save, parallel, {})
    return Save(seconds, 0.0, seconds)


def asynchronous(
    store: CheckpointStore, parallel: MultimodalParallelModule, step: Callable[[], float],
    usual: float,
) -> Save:
    """A save of the current state, and steps until it counts.

    Args:
        store: keeps it.
        parallel: the model.
        step: takes one; returns its seconds.
        usual: seconds of a step with nothing beside it.
    """
    start = time.perf_counter()
    stall = timed(store.start, parallel, {})
    beside = [step() for _ in range(LEAST_STEPS)]
    while (saved := store.ended()) is None:
        beside.append(step())
    # It is committed between two looks; it says itself when.
    committed = min(saved.seconds + stall, time.perf_counter() - start)
    return Save(stall, sum(beside) - usual * len(beside), committed)


def measure(folder: Path, hidden: int, layers: int, rounds: int) -> dict[str, Any]:
    """All figures."""
    model, batch = build(hidden, layers)
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=STAGES), MICROBATCHES).plan(model)
    saves: dict[str, list[Save]] = {"synchronous": [], "asynchronous": []}
    store = CheckpointStore(folder, keep=1)
    with _common.local_ray(4), MultimodalParallelModule(model, plan) as parallel:
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
    """Run and print."""
    parser = _common.parser(str(__doc__).split("\n", 1)[0])
    parser.add_argument("--hidden", type=int, default=768, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=8, help="its layers")
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
    _common.console().print(table)
    _common.emit({**found, "machine": _common.machine()}, args.json)


if __name__ == "__main__":
    main()
