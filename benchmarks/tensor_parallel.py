"""Claim: tensor parallelism with local tensors is faster than transformers' with DTensor.

Run with `python -m benchmarks.tensor_parallel --json`.

Two processes: local tensors as in raymm's stages, and DTensor as transformers applies its own plan.
A Llama of four layers, fp32, one step of forward and backward, gloo on the loopback, one thread per
process, alternating; loss over the full vocabulary.

- `seconds_<way>_<hidden>`: median of the slower process's wall time, for `local` (raymm), `dtensor`
  (`transformers.distributed.tensor_parallel.apply_tensor_parallelism`) and `whole` (every process
  runs the full model, which sharding has to beat);
- `dtensor_over_local_<hidden>`: ratio of the medians;
- `relative_error_<hidden>`: the larger error of the two sharded losses against the unsharded one.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.ranks import gloo_ranks

PROCESSES = 2
LAYERS, HEADS, KEY_HEADS, VOCABULARY = 4, 8, 4, 4096
ROWS = 2
# (hidden size, tokens per row)
SIZES = ((64, 32), (256, 64), (512, 128))
WAYS = ("local", "dtensor", "whole")
WARM_UP = 2


def llama(hidden: int) -> torch.nn.Module:
    """Build a model with the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )


def sharded_locally(model: torch.nn.Module, group: dist.ProcessGroup) -> Callable:
    """Shard the model in place with raymm; return the loss function of the sharded logits."""
    from raymm.actors.sharding.tensor_plan import plan_module
    from raymm.actors.sharding.tensor_shard import shard_module
    from raymm.kernels.collectives.tensor_group import TensorGroup
    from raymm.kernels.cross_entropy import vocabulary_parallel_cross_entropy_sum

    members = TensorGroup(group)
    plan = plan_module(model, members.size, "llm")
    shard_module(model, plan, members)
    start, _ = plan.vocabulary(members.rank)
    return lambda logits, targets: vocabulary_parallel_cross_entropy_sum(
        logits, targets, start, members
    )


def sharded_by_dtensor(model: torch.nn.Module) -> None:
    """Shard the model with transformers' own plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    styles: Any = model.tp_plan
    chosen = {}
    for name, module in model.named_modules():
        style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            chosen[name] = style
            own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
            chosen |= {f"{name}.{leaf}": style for leaf in own}
    apply_tensor_parallelism(model, init_device_mesh("cpu", (PROCESSES,)), chosen)


def measure(
    group: dist.ProcessGroup, hidden: int, tokens: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return one process's seconds per method and round, and its losses."""
    models = {way: llama(hidden) for way in WAYS}
    losses: dict[str, Callable] = dict.fromkeys(WAYS, _whole_loss)
    losses["local"] = sharded_locally(models["local"], group)
    sharded_by_dtensor(models["dtensor"])
    draw = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, VOCABULARY, (2, ROWS, tokens), generator=draw)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    values: dict[str, float] = {}
    for number in range(WARM_UP + rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            dist.barrier(group)
            start = time.perf_counter()
            logits = models[way](input_ids=ids, use_cache=False).logits
            loss = losses[way](logits.flatten(0, 1), targets.flatten())
            loss.backward()
            if number >= WARM_UP:
                seconds[way].append(time.perf_counter() - start)
            values[way] = float(loss.detach())
            models[way].zero_grad()
    return seconds, values


def _whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    args = options.parse_args()
    result: dict[str, Any] = {
        "machine": common.machine(), "processes": PROCESSES, "rounds": args.rounds,
    }  # fmt: skip
    table = Table("hidden x tokens", *(f"{way} (ms)" for way in WAYS), "dtensor / local")
    with gloo_ranks(PROCESSES) as ranks:
        for hidden, tokens in SIZES:
            answers = ranks.run(measure, hidden=hidden, tokens=tokens, rounds=args.rounds)
            median = {
                way: statistics.median(map(max, zip(*(s[way] for s, _ in answers), strict=True)))
                for way in WAYS
            }
            _, values = answers[0]
            ratio = median["dtensor"] / median["local"]
            result |= {f"seconds_{way}_{hidden}": round(median[way], 4) for way in WAYS}
            result[f"dtensor_over_local_{hidden}"] = round(ratio, 3)
            result[f"relative_error_{hidden}"] = max(
                abs(values[way] - values["whole"]) / values["whole"] for way in WAYS
            )
            table.add_row(
                f"{hidden} x {ROWS * tokens}", *(f"{1e3 * median[way]:.1f}" for way in WAYS),
                f"{ratio:.2f}",
            )
    common.console().print(table)
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
