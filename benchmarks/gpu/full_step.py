"""Section on steps of a model of Qwen3-VL-2B's size through the rank actor.

They are compared with transformers' own forward and backward with a fused AdamW. Further parts: how
far the host is ahead of the device, how far bf16 gradients are from fp32, and one trace of the
profiler.

All weights are random. Only the sizes are those of the published model.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import Device, relative_error
from benchmarks.gpu.one_rank import (
    LARGE,
    TINY,
    OneRank,
    build_model,
    microbatches,
    on_one_rank,
    plan_of,
    step_inputs,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import RESULTS
from raymm.costs.named_devices import device_called
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.model.vlm_batch import vlm_parts
from raymm.scheduler.search.module_degrees import make_plan

WARM_UP_STEPS, STEPS = 2, 5
LEARNING_RATE, CLIP = 1e-4, 1.0
# Relative difference of losses between raymm and transformers: bf16, and other attention kernels.
LOSS_BOUND = 1e-2
# Relative to a gradient's norm: bf16 has 8 bits, and a product of many blocks adds to that.
GRADIENT_BOUND = 0.2
# Share of the total gradient norm below which a parameter's norm counts as 0.
ZERO = 1e-5
# Text tokens per row of the parts on the host's lead.
AHEAD = (8192, 2048, 512)
# Rows of the table of kernels at the end of a trace.
KERNELS = 12


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-VL model and its step.

    Attributes:
        text_tokens: text tokens of a row, which also has an image.
        side: patches per image side, even.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    text_tokens: int
    side: int
    rows: int
    microbatches: int

    @property
    def image_tokens(self) -> int:
        """Return the tokens of an image in the language model: one per four patches."""
        return (self.side // 2) ** 2

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, text and images."""
        return self.microbatches * self.rows * (self.text_tokens + self.image_tokens)


TWO_B = Shape(
    {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128,
     "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
     "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                         "mrope_section": [24, 20, 20]}},
    {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
     "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]},
    text_tokens=3072, side=64, rows=1, microbatches=4,
)  # fmt: skip
SMALL = Shape(
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
     "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 151936 // 256,
     "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True,
                         "mrope_section": [4, 2, 2]}},
    {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
     "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    text_tokens=12, side=4, rows=1, microbatches=2,
)  # fmt: skip
VISION_START, IMAGE = 1, 2
"""Ids of the first token of an image and of all others."""


def run(device: Device, record: Record) -> None:
    """Run the large step twice, then the parts on a smaller model."""
    shape = device.choose(TWO_B, SMALL)
    losses: list[float] = []
    record.part("raymm", partial(raymm_step, device, shape, losses))
    record.part("transformers", partial(transformers_step, device, shape, losses))
    for tokens in device.choose(AHEAD, (24,)):
        record.part(f"host ahead, {tokens} tokens", partial(host_ahead, device, tokens))
    record.part("bf16 gradients", partial(gradients, device))
    record.part("trace", partial(trace, device))


def config_of(shape: Shape) -> Any:
    """Return the configuration, with tied embeddings."""
    from transformers import Qwen3VLConfig

    text = shape.text | {"tie_word_embeddings": True}
    config = Qwen3VLConfig(
        text_config=text, vision_config=shape.vision, image_token_id=IMAGE,
        vision_start_token_id=VISION_START, video_token_id=3, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def batches_of(shape: Shape, config: Any) -> list[dict[str, torch.Tensor]]:
    """Return random tokens and images of a step, as the model's processor would return them."""
    generator = torch.Generator().manual_seed(0)
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    found = []
    for _ in range(shape.microbatches):
        ids = torch.randint(
            4, config.text_config.vocab_size, (shape.rows, shape.text_tokens), generator=generator
        )
        ids[:, 0] = VISION_START
        images = torch.full((shape.rows, shape.image_tokens), IMAGE)
        ids = torch.cat([ids[:, :1], images, ids[:, 1:]], 1)
        found.append({
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).int(),
            "pixel_values": torch.randn(shape.rows * shape.side**2, patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, shape.side, shape.side]] * shape.rows),
            "labels": ids.masked_fill(ids == IMAGE, -100),
        })  # fmt: skip
    return found


def flop_of(shape: Shape, config: Any) -> float:
    """Return the FLOPs of a step's forward and backward.

    6 per weight of a matrix and token, and those of attention, halved for causal rows.
    """
    text, vision = config.text_config, config.vision_config
    heads = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    block = text.hidden_size * (2 * heads + 2 * keys + 3 * text.intermediate_size)
    weights = text.num_hidden_layers * block + text.hidden_size * text.vocab_size
    length = shape.text_tokens + shape.image_tokens
    attention = text.num_hidden_layers * 12 * heads * length / 2
    patches = shape.side**2
    tower = vision.depth * vision.hidden_size * (
        4 * vision.hidden_size + 2 * vision.intermediate_size
    )  # fmt: skip
    seen = vision.depth * 12 * vision.hidden_size * patches
    rows = shape.rows * shape.microbatches
    return rows * (length * (6.0 * weights + attention) + patches * (6.0 * tower + seen))


def figures(
    device: Device, shape: Shape, config: Any, times: list[float], peak: int
) -> dict[str, Any]:
    """Return seconds, tokens per second, model FLOP/s utilisation (MFU) and peak bytes of a step.
    """
    seconds = statistics.median(times)
    flop = flop_of(shape, config)
    found = {
        "step_s": round(seconds, 4),
        "tokens_per_s": round(shape.tokens / seconds),
        "tflops": round(flop / seconds / 1e12, 1),
        "peak_gb": round(peak / 1e9, 2),
    }
    spec = device_called(torch.cuda.get_device_name(0)) if device.is_gpu else None
    if spec is not None:
        found["mfu"] = round(flop / seconds / spec.peak("bf16"), 4)
    return found


def timed(device: Device, call: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """Return seconds and results of steps, after a warm-up."""
    times, results = [], []
    for _ in range(device.choose(WARM_UP_STEPS, 0) + device.choose(STEPS, 1)):
        device.synchronize()
        start = time.perf_counter()
        results.append(call())
        device.synchronize()
        times.append(time.perf_counter() - start)
    return times[device.choose(WARM_UP_STEPS, 0) :], results


def whole_model(shape: Shape, batches: list[dict[str, torch.Tensor]]) -> PretrainedVlm:
    """Return the model as a raymm model."""
    return from_pretrained(config_of(shape), batches[0], seed=1)


def whole_rank(device: Device, shape: Shape) -> OneRank:
    """Return the only rank of the model, in bf16."""
    batches = batches_of(shape, config_of(shape))
    model = whole_model(shape, batches)
    whole = {node.name: ((0, node.num_layers),) for node in model.graph.nodes}
    plan = on_one_rank(make_plan(model.graph, whole, shape.microbatches))
    parts = [vlm_parts(model.tower_inputs, batch, model.text_module) for batch in batches]
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    return OneRank(model, plan, device.kind, "bfloat16", parts, labels)


def raymm_step(device: Device, shape: Shape, losses: list[float]) -> Mapping[str, Any]:
    """Measure a step through the rank actor."""
    rank = whole_rank(device, shape)
    times, results = timed(device, rank.step)
    losses.append(sum(results[0].losses.values()))
    found = figures(
        device, shape, config_of(shape), times, max(result.peak_bytes for result in results)
    )
    found["parameters"] = sum(rank.parameters.values())
    found["first_loss"] = round(losses[0], 5)
    rank.close()
    return found


def transformers_step(device: Device, shape: Shape, losses: list[float]) -> Mapping[str, Any]:
    """Measure the same step in transformers and torch.

    fp32 weights, autocast, SDPA, gradients of all microbatches accumulated, clipping, fused AdamW.

    Raises:
        AssertionError: the loss of the first step differs from raymm's by more than bf16's
            rounding.
    """
    found, first = _transformers_figures(device, shape)
    gc.collect()
    device.release()
    if losses:  # with the same weights
        off = abs(first - losses[0]) / abs(first)
        assert off <= LOSS_BOUND, f"loss {losses[0]}, of transformers {first}"
    return found


def _transformers_figures(device: Device, shape: Shape) -> tuple[dict[str, Any], float]:
    """Return the figures, and the loss of the first step."""
    config = config_of(shape)
    on_host = batches_of(shape, config)
    model: Any = whole_model(shape, on_host).materialize().to(device.torch).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = [
        {name: value.to(device.torch) for name, value in batch.items()}
        for batch in on_host
    ]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def step() -> float:
        summed = torch.zeros((), device=device.torch)
        for batch in batches:
            with torch.autocast(device.kind, torch.bfloat16):
                loss = model(**batch, num_items_in_batch=total, use_cache=False).loss
            loss.backward()
            summed += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return summed.item()

    if device.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, results = timed(device, step)
    peak = torch.cuda.max_memory_allocated() if device.is_gpu else 0
    found = figures(device, shape, config, times, peak)
    found["first_loss"] = round(results[0], 5)
    found["implementation"] = model.config._attn_implementation
    return found, results[0]


def host_ahead(device: Device, tokens: int) -> Mapping[str, Any]:
    """Measure a step, the time to issue it, and the device's remaining time once all is issued.

    All in milliseconds. If the remaining time is near 0, the host limits the step.
    """
    sizes = device.choose(replace(LARGE, rows=1, text=tokens), replace(TINY, text=tokens))
    model = build_model(sizes)
    inputs = step_inputs(microbatches(sizes))
    rank = OneRank(model, plan_of(device, model, sizes), device.kind, "bfloat16", *inputs)
    issued: list[float] = []
    finish = rank.actor._finished

    def finished(result: Any) -> Any:
        issued.append(time.perf_counter())
        return finish(result)

    rank.actor._finished = finished
    rows = []
    for number in range(device.choose(WARM_UP_STEPS + STEPS, 1)):
        device.synchronize()
        start = time.perf_counter()
        rank.step()
        device.synchronize()
        end = time.perf_counter()
        if number >= device.choose(WARM_UP_STEPS, 0):
            rows.append((end - start, issued[-1] - start))
    rank.close()
    step, issue = (statistics.median(each) for each in zip(*rows, strict=True))
    return {
        "tokens_per_row": sizes.tokens,
        "step_ms": round(1e3 * step, 2),
        "issued_ms": round(1e3 * issue, 2),
        "ahead_ms": round(1e3 * (step - issue), 2),
    }


def gradients(device: Device) -> Mapping[str, Any]:
    """Return the error of each parameter's bf16 gradient relative to its fp32 norm, on this device.

    Raises:
        AssertionError: the largest error is above :data:`GRADIENT_BOUND`, or other parameters have
            gradients.
    """
    sizes = device.choose(
        replace(LARGE, rows=1, text=1024, microbatches=2, llm=LARGE.llm | {"vocab_size": 8000}),
        TINY,
    )
    found: list[dict[Any, torch.Tensor]] = []
    for dtype in (None, "bfloat16"):
        model = build_model(sizes)
        inputs = step_inputs(microbatches(sizes))
        rank = OneRank(
            model, plan_of(device, model, sizes), device.kind, dtype, *inputs, update=False
        )
        rank.step()
        grads = rank.actor.gradients()
        # A tower has unused parameters, such as those of its pooling head.
        found.append({name: g.float().cpu() for name, g in grads.items() if g is not None})
        del grads
        rank.close()
    exact, actual = found
    assert exact and exact.keys() == actual.keys(), "other parameters have gradients"
    norms = [torch.cat([g.flatten() for g in each.values()]).norm().item() for each in found]
    # Some gradients are rounding error alone: a key's bias shifts all scores of a row, which
    # softmax ignores.
    off = {
        name: relative_error(actual[name], gradient)
        for name, gradient in exact.items() if gradient.norm().item() > ZERO * norms[0]
    }
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= GRADIENT_BOUND, f"{worst}: {off[worst]:.3g} of its norm"
    return {
        "parameters": len(off),
        "median": f"{statistics.median(off.values()):.1e}",
        "largest": f"{off[worst]:.1e}",
        "of": "/".join(map(str, worst)),
        "norm_off": f"{abs(norms[1] - norms[0]) / norms[0]:.1e}",
    }


def trace(device: Device) -> Mapping[str, Any]:
    """Profile a step with torch: the device's busy share, and the kernels that take longest.

    On a GPU the trace is stored next to the results file.
    """
    from torch.profiler import ProfilerActivity, profile

    sizes = device.choose(LARGE, TINY)
    model = build_model(sizes)
    inputs = step_inputs(microbatches(sizes))
    rank = OneRank(model, plan_of(device, model, sizes), device.kind, "bfloat16", *inputs)
    for _ in range(WARM_UP_STEPS if device.is_gpu else 0):
        rank.step()
    device.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_gpu else [])]
    start = time.perf_counter()
    with profile(activities=activities) as profiler:
        rank.step()
        device.synchronize()
    seconds = time.perf_counter() - start
    rank.close()
    busy: Counter[str] = Counter()
    for event in profiler.key_averages():
        # On a GPU kernels, which take no time on the host; on a CPU operators.
        own = event.self_device_time_total if device.is_gpu else event.self_cpu_time_total
        if own and not (device.is_gpu and event.self_cpu_time_total):
            busy[event.key] += int(own)
    total = sum(busy.values())
    found: dict[str, Any] = {
        "step_s": round(seconds, 4),
        "busy_share": round(total / 1e6 / seconds, 3),
        "kernels": [f"{us / 1e3:.2f} ms {name[:120]}" for name, us in busy.most_common(KERNELS)],
    }
    if device.is_gpu:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        found["trace"] = str(path)
    return found
