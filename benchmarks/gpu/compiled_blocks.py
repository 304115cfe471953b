"""Section on a block with raymm's attention under ``torch.compile``: time, graph breaks, numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import Device, relative_error
from benchmarks.gpu.one_rank import LARGE, TINY, VISION, Sizes, build_model, microbatches, plan_of
from benchmarks.gpu.record import Record
from raymm.actors.memory.to_device import to_device
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.compiled_blocks import compile_blocks
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.layout.stage_builders import stage_builders
from raymm.model.batch_rules import text_inputs
from raymm.model.model import LANGUAGE_MODEL
from raymm.scheduler.plan.stage import StageId

# One block is compiled, as all blocks of a module are equal. The other modules are small.
ONE_BLOCK = replace(
    LARGE, vision=LARGE.vision | {"num_hidden_layers": 1},
    llm=LARGE.llm | {"num_hidden_layers": 1, "vocab_size": 1000},
)  # fmt: skip
# Relative error of outputs and gradients: bf16 with other rounding between operators.
BOUND = 3e-2


def run(device: Device, record: Record) -> None:
    """Measure the vision encoder with torch's attention, and the language model with raymm's."""
    for name in device.choose((VISION, LANGUAGE_MODEL), (LANGUAGE_MODEL,)):
        record.part(name, partial(measure, device, name))


def measure(device: Device, name: str) -> Mapping[str, Any]:
    """Return milliseconds of a module of one block, forward and backward in bf16, plain and
    compiled.

    Raises:
        AssertionError: numbers differ by more than bf16's rounding.
    """
    sizes = device.choose(ONE_BLOCK, replace(TINY, llm=TINY.llm | {"num_hidden_layers": 1}))
    model = build_model(sizes)
    stage: Any = stage_builders(model, plan_of(device, model, sizes)).build[StageId(name, 0)]()
    stage = stage.to(device.torch).train()
    call = _iteration(device, stage, sizes, name)
    plain, before = device.milliseconds(call), [t.clone() for t in call()]
    path = find_blocks(stage.module)
    assert path is not None
    blocks = block_list(stage.module, path)
    torch._dynamo.utils.counters.clear()
    # A CPU would need a compiler for a single run.
    compile_blocks(blocks, name, device.choose("inductor", "eager"))
    start = time.perf_counter()
    call()
    device.synchronize()
    first = time.perf_counter() - start
    compiled, after = device.milliseconds(call), call()
    breaks = torch._dynamo.utils.counters["graph_break"]
    off = max(map(relative_error, after, before))
    assert off <= BOUND, f"{off:.3g} of the norm, at most {BOUND}"
    return {
        "plain_ms": round(plain, 3),
        "compiled_ms": round(compiled, 3),
        "plain_over_compiled": round(plain / compiled, 3),
        "first_call_s": round(first, 2),
        "graph_breaks": sum(breaks.values()),
        "off": f"{off:.1e}",
        "reasons": [f"{count} {reason[:300]}" for reason, count in breaks.items()],
    }


def _iteration(device: Device, stage: Any, sizes: Sizes, name: str) -> Any:
    """Run a forward and a backward; return the output and two parameters' gradients."""
    batch = microbatches(sizes)[0]
    inputs = batch[VISION] if name == VISION else text_inputs(batch)
    inputs = to_device(inputs, device.torch)
    shape = (sizes.rows, sizes.image_tokens, sizes.llm["hidden_size"])
    received: dict[str, Message] = {}
    if name == LANGUAGE_MODEL:
        received[VISION] = Message((torch.randn(shape, device=device.torch),), {})
    parameters = [p for p in stage.parameters() if p.requires_grad]

    def call() -> list[torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast(device.kind, torch.bfloat16):
            output = stage.run(dict(inputs), received, MicrobatchContext(1)).outputs[0]
        output.backward(None if output.dim() == 0 else torch.ones_like(output))
        gradients = [p.grad for p in (parameters[0], parameters[-1]) if p.grad is not None]
        return [output.detach(), *gradients]

    return call
