"""Claim: two pipeline stages generate text for eight prompts faster than one process.

Run with `python -m benchmarks.generate --json`.

A Llama with random weights, fp32, greedy, without an end token, on the same two cores: every method
generates the same tokens, and `tokens_equal` reports if it did. Methods alternate:

- `pipelined`: two single-threaded ranks, all prompts in flight at once, in two steps (the default
  of :func:`raymm.runtime.generation.generate`);
- `one_at_a_time`: the same ranks with one prompt in flight, to measure the gain from several in
  flight;
- `one_process`: transformers' `generate` with its KV cache, one prompt after the other, with two
  threads;
- `one_process_one_core`: the same with one thread;
- `one_process_batch`: the same with two threads and all prompts as one left-padded batch, which
  reads the weights once for all of them.

`tokens_per_second_ratio` is `pipelined` over the faster of `one_process` and `one_process_one_core`
(on a busy machine two threads that wait for each other are slower than one), median over rounds.
Its bound is printed next to it. Every token of a prompt waits for the previous one, through both
stages; several steps in flight hide that wait, so at best the slower rank computes without a pause.
`busy_share` is the fraction of the time in which it computed, `bound_tokens_per_second` the rate if
it never paused, `bound_ratio` that rate over the same process. `chain_ms` is the latency of a token
with no other step in flight: the compute of both stages (`chain_compute_ms`), and messages, calls
and replies between them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table

from benchmarks.shared import common

VOCABULARY, PROMPTS, STAGES, CORES = 4096, 8, 2, 2
WARM_UP = 1
WAYS = ("pipelined", "one_at_a_time", "one_process", "one_process_one_core", "one_process_batch")


def llama(hidden: int, layers: int) -> Any:
    """Return a model with weights large enough that every token depends on all previous ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCABULARY, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return module


def prompts_of(longest: int) -> list[list[int]]:
    """Return prompts of different lengths, from half of the longest up."""
    draw = torch.Generator().manual_seed(1)
    lengths = [longest - number * longest // (2 * PROMPTS) for number in range(PROMPTS)]
    return [torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def in_one_process(
    module: Any, prompts: list[list[int]], tokens: int, threads: int, batched: bool
) -> list[list[int]]:
    """Generate with transformers.

    Args:
        tokens: number of tokens to generate per prompt.
        batched: True to generate for all prompts as one batch.
    """
    torch.set_num_threads(threads)
    batches = [prompts] if batched else [[ids] for ids in prompts]
    written: list[list[int]] = []
    for batch in batches:
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        out = module.generate(
            input_ids=ids, attention_mask=seen, max_new_tokens=tokens, do_sample=False,
            use_cache=True,
        )
        written += out[:, width:].tolist()
    torch.set_num_threads(1)
    return written


class Ranks:
    """Model on the ranks of a pipeline, with the compute time of their steps."""

    def __init__(self, module: Any) -> None:
        from raymm.model.modality_module import ModalityModule
        from raymm.model.multimodal import MultimodalModule
        from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

        spec = MultimodalParallelSpec({}, ParallelSpec(pp=STAGES), 1)
        self.parallel = spec.apply(MultimodalModule({}, ModalityModule(module)))
        self.steps: list[list[float]] = []
        """Compute seconds of the ranks, for each step since the start of :meth:`write`."""
        self._submit, submitted = self.parallel.submit, self._noted
        self.parallel.submit = submitted  # type: ignore[method-assign]

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        pending = self._submit(*args, **kwargs)
        scores = pending.scores

        def noted() -> Any:
            timeline = pending.result().timeline
            self.steps.append([timeline.busy(rank) for rank in range(STAGES)])
            return scores()

        pending.scores = noted  # type: ignore[method-assign]
        return pending

    def write(
        self, prompts: list[list[int]], tokens: int, under_way: int | None
    ) -> list[list[int]]:
        """Generate with the ranks.

        Args:
            tokens: number of tokens to generate per prompt.
        """
        from raymm.runtime.generation import Prompt, generate

        self.steps.clear()
        texts = [Prompt.of_text(ids) for ids in prompts]
        return list(generate(self.parallel, texts, tokens, under_way=under_way))


@contextmanager
def ranks_of(module: Any) -> Iterator[Ranks]:
    """Start ranks for a `with` block."""
    ranks = Ranks(module)
    try:
        yield ranks
    finally:
        ranks.parallel.shutdown()


def measure(module: Any, prompts: list[list[int]], tokens: int, rounds: int) -> dict[str, Any]:
    """Measure all methods in alternating rounds."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    written: dict[str, list[list[list[int]]]] = {way: [] for way in WAYS}
    busy: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    chain: list[float] = []
    with ranks_of(module) as ranks:
        ways: dict[str, Callable[[], list[list[int]]]] = {
            "pipelined": lambda: ranks.write(prompts, tokens, None),
            "one_at_a_time": lambda: ranks.write(prompts, tokens, 1),
            "one_process": lambda: in_one_process(module, prompts, tokens, CORES, False),
            "one_process_one_core": lambda: in_one_process(module, prompts, tokens, 1, False),
            "one_process_batch": lambda: in_one_process(module, prompts, tokens, CORES, True),
        }
        for number in range(WARM_UP + rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                ranks.steps.clear()
                start = time.perf_counter()
                texts = ways[way]()
                taken = time.perf_counter() - start
                written[way].append(texts)
                if number >= WARM_UP:
                    seconds[way].append(taken)
                    busy[way].append([sum(rank) for rank in zip(*ranks.steps, strict=True)])
                    if way == "one_at_a_time":
                        chain.append(statistics.median(map(sum, ranks.steps)))
    return result_of(seconds, busy, written, chain, len(prompts) * tokens)


def result_of(
    seconds: dict[str, list[float]], busy: dict[str, list[list[float]]],
    written: dict[str, list[list[list[int]]]], chain: list[float], tokens: int,
) -> dict[str, Any]:
    """Return the figures.

    Args:
        busy: compute seconds of every rank, for each method on ranks and each round.
        written: tokens of every prompt, for each method and round.
        chain: median compute seconds of a token on all ranks with one prompt in flight, per round.
    """
    due = written["one_process"][0]
    rate = {way: tokens / statistics.median(values) for way, values in seconds.items()}

    def over(way: str, other: str) -> float:
        pairs = zip(seconds[way], seconds[other], strict=True)
        return round(statistics.median(b / a for a, b in pairs), 3)

    slowest = statistics.median(map(max, busy["pipelined"]))
    against = max(("one_process", "one_process_one_core"), key=rate.__getitem__)
    return {
        "tokens_per_second_ratio": over("pipelined", against),
        "against": against,
        "bound_ratio": round(tokens / slowest / rate[against], 3),
        "bound_tokens_per_second": round(tokens / slowest, 1),
        "busy_share": round(slowest / statistics.median(seconds["pipelined"]), 3),
        "ranks_busy_seconds": [
            round(statistics.median(rank), 4) for rank in zip(*busy["pipelined"], strict=True)
        ],
        "chain_ms": round(1e3 / rate["one_at_a_time"], 3),
        "chain_compute_ms": round(1e3 * statistics.median(chain), 3),
        "pipelined_over_one_at_a_time": over("pipelined", "one_at_a_time"),
        "pipelined_over_one_process": over("pipelined", "one_process"),
        "pipelined_over_one_process_one_core": over("pipelined", "one_process_one_core"),
        "pipelined_over_one_process_batch": over("pipelined", "one_process_batch"),
        "tokens_per_second": {way: round(value, 1) for way, value in rate.items()},
        "tokens_equal": all(texts == due for way in WAYS for texts in written[way]),
        "different_tokens": len({token for text in due for token in text}),
    }


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=32, help="generated tokens per prompt")
    options.add_argument("--prompt", type=int, default=48, help="tokens of the longest prompt")
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--layers", type=int, default=8)
    args = options.parse_args()
    result = {
        "benchmark": "generate", "machine": common.machine(),
        **{name: getattr(args, name) for name in ("rounds", "tokens", "prompt", "hidden")},
        "layers": args.layers, "prompts": PROMPTS, "stages": STAGES,
    }
    module = llama(args.hidden, args.layers)
    with common.local_ray(STAGES):
        result |= measure(module, prompts_of(args.prompt), args.tokens, args.rounds)
    table = Table("way", "tokens/s")
    for way, value in result["tokens_per_second"].items():
        table.add_row(way, f"{value:.1f}")
    common.console().print(table)
    common.emit(result, args.json)
    if not result["tokens_equal"]:
        sys.exit("the methods do not generate the same tokens")


if __name__ == "__main__":
    main()
