"""Claim: counted costs are within 5 % of torch's measurements for every kind of module.

Run with `python -m benchmarks.cost_truth --json`.

Figures per kind of module and input size: parameters; FLOPs of a forward and of a backward that
reaches the inputs (`FlopCounterMode`; for attention, the visible pairs of its mask); bytes that
autograd saves (`saved_tensors_hooks`, without parameters); and bytes of the messages between stages
of one layer each. `flops_max_relative_error` and `bytes_max_relative_error` are the largest
relative errors of all rows; `parameters_max_relative_error` must be 0.
`messages_max_relative_error` is the largest relative error of the planned bytes per pipeline edge
against the bytes that the ranks report for a step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import eager_mask
from transformers.utils.generic import ModelOutput

from benchmarks.shared import common
from benchmarks.shared.cost_cases import VOCABULARY, Case, cases
from benchmarks.shared.sent_messages import message_rows
from raymm.actors.modules.blocks import block_list, find_blocks, input_embeddings, num_blocks
from raymm.actors.modules.message import first_tensor
from raymm.actors.modules.projector import Projector
from raymm.actors.weights.model_part import is_within
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_layers, projector_layers
from raymm.costs.forward_run import forward_run, kept_elements
from raymm.costs.layer_count import count_layers
from raymm.costs.load import Load
from raymm.costs.observed_load import observe
from raymm.costs.workload import microbatch_workload
from raymm.kernels.cross_entropy import token_cross_entropy_sum
from raymm.kernels.hf import self_attention
from raymm.kernels.hf.self_attention import can_use
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.vlm import PretrainedVlm, from_pretrained

SAMPLES = 2
_EAGER = "cost_truth"
FLOPS = ("forward", "backward")
BYTES = ("saved", "messages")


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """Yield counted and measured figures of a case, by size."""
    for size, make in enumerate(case.inputs):
        torch.manual_seed(size)
        model = case.source().build().eval()
        module, relayed = case.source().new_skeleton().eval(), 0
        if case.whole:
            inputs = make()
            whole = from_pretrained(_described(case), inputs)
            load = microbatch_workload(whole, inputs).by_module[LANGUAGE_MODEL]
            module = whole.language_spec().source.new_skeleton().eval()
            inputs, relayed = _without_tower(model, whole, inputs)
        elif case.causal:
            tokens = case.tokens[size]
            load = Load(SAMPLES, tokens)
            inputs = {"inputs_embeds": torch.randn(SAMPLES, tokens, _width(model))}
        else:
            inputs = make()
            load = _seen(case, inputs)
        figures = counted(module, load, case.causal)
        found = measured(model, inputs, case.causal)
        # Later blocks read the tower's output, which every stage but the last forwards.
        found["messages"] += relayed * (num_blocks(model) - 1)
        yield {"case": case.name, "size": size, "counted": figures, "measured": found}


def _described(case: Case) -> PretrainedConfig:
    """Return the configuration of a case's model, which names its class."""
    source = cast(ConfigSource, case.source())
    source.config.architectures = [source.model_class.__name__]
    return source.config


def _without_tower(
    model: nn.Module, whole: PretrainedVlm, inputs: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Feed a model the features of its tower as received, without the tower's parameters.

    Returns:
        Inputs without labels, and bytes of the features.
    """
    (tower,) = whole.towers
    with torch.no_grad():
        computed = tower.output(model, tower.inputs(inputs) or {})
    features = tree_map_only(torch.Tensor, lambda t: t.requires_grad_(), computed)
    tower.call.replace(model, lambda *_, **__: features)
    for name in [n for n, _ in model.named_parameters() if is_within(n, tower.places)]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, None)
    without_labels = {name: value for name, value in inputs.items() if name != "labels"}
    return without_labels, sum(t.nbytes for t in tree_leaves(features) if torch.is_tensor(t))


def _width(model: nn.Module) -> int:
    return input_embeddings(model).weight.shape[1]


def _seen(case: Case, inputs: dict[str, Any]) -> Load:
    """Return the load of an encoder's inputs, as in a plan."""
    module = case.source().build().eval()
    (seen,) = observe(module, inputs, module)
    (halved,) = observe(module, inputs, module, dtype=torch.bfloat16)
    load = seen.load()
    if load is None:
        raise SystemExit(f"{case.name} does not come to its blocks")
    load = replace(load, kept=kept_elements(seen, halved, load.total))
    if isinstance(module, Projector):
        load = replace(
            load, projector_places=load.places, projector_handed=load.handed,
            projector_kept=load.kept,
        )
    return load


def counted(module: nn.Module, load: Load, causal: bool) -> dict[str, float]:
    """Return the figures of the cost model."""
    layers = count_layers(module, load, causal, forward_run(module, load, "fp32", causal))
    if isinstance(module, Projector):  # one layer, whatever its components
        costs = projector_layers(module, load, "cpu", "fp32")
    else:
        costs = analytic_layers(module, load, "cpu", "fp32", causal=causal)
    products = sum(layer.matmul_flops for layer in layers)
    attention = sum(layer.attention_flops + layer.mixing_flops for layer in layers)
    base = sum(layer.base_flops for layer in layers)
    return {
        "parameters": sum(layer.parameters for layer in layers) - layers[-1].tied,
        "forward": products + attention + sum(layer.weight_flops for layer in layers),
        # Base weights under adapters have no gradients.
        "backward": 2 * products - base + 2 * attention,
        "saved": sum(cost.activation_bytes for cost in costs),
        "messages": sum(cost.output_bytes for cost in costs[: len(costs) - causal]),
    }


def measured(model: nn.Module, inputs: dict[str, Any], causal: bool) -> dict[str, float]:
    """Return the figures of real runs."""
    forward, backward = _flops(copy.deepcopy(model), inputs, causal)
    saved, messages = _bytes(model, inputs, causal)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "forward": forward,
        "backward": backward, "saved": saved, "messages": messages,
    }


def _run(model: nn.Module, inputs: dict[str, Any], causal: bool) -> torch.Tensor:
    """Return a loss for which autograd saves no tensors beyond those of the model."""
    inputs = {
        k: v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    if not causal:
        outputs = {id(t): t for t in tree_leaves(dict(output=_plain(model(**inputs))))}
        sums = [t.sum() for t in outputs.values() if isinstance(t, torch.Tensor)]
        return torch.stack(sums).sum()
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
    return token_cross_entropy_sum(logits, torch.arange(len(logits)) % VOCABULARY)


def _plain(output: Any) -> Any:
    """Convert the output of a transformers model to containers that torch supports."""
    return dict(output) if isinstance(output, ModelOutput) else output


def _convolution_backward(
    gradient: Any, inputs: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Return FLOPs of both gradients of a convolution; torch counts grouped ones as if dense."""
    rows = math.prod(gradient[:1]) * math.prod(gradient[2:])
    return 2 * 2 * rows * math.prod(weight)


def _solve(
    system: Any, right: Any, *_: Any, left: bool = True, out_shape: Any = None, **__: Any
) -> int:
    """Return FLOPs of a triangular solve, which torch does not count."""
    equations = right[-2] if left else right[-1]
    return math.prod(right) * equations


CUSTOM_FLOPS = {
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.linalg_solve_triangular: _solve,
}


class _Pairs:
    """FLOPs of the computed attention, and of its visible pairs."""

    computed = visible = 0.0


@contextmanager
def _eager(model: nn.Module) -> Iterator[_Pairs]:
    """Use attention by plain products, which torch's counter supports, under the model's own mask.
    """
    pairs = _Pairs()

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
        flops = 2.0 * scores.numel() * (query.shape[-1] + value.shape[-1])
        share = 1.0
        if attention_mask is not None:
            mask = attention_mask[..., : key.shape[2]]
            share = float((mask > torch.finfo(mask.dtype).min / 2).float().mean())
            scores = scores + mask
        pairs.computed, pairs.visible = pairs.computed + flops, pairs.visible + flops * share
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    if can_use(model):
        AttentionInterface.register(_EAGER, attend)
        AttentionMaskInterface.register(_EAGER, eager_mask)
        model.set_attn_implementation(_EAGER)  # pyright: ignore[reportCallIssue]
        model.config._experts_implementation = "eager"  # pyright: ignore
    yield pairs


def _flops(model: nn.Module, inputs: dict[str, Any], causal: bool) -> tuple[float, float]:
    with _eager(model) as pairs:
        with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as forward:
            loss = _run(model, inputs, causal)
        with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as backward:
            loss.backward()
    unseen = pairs.computed - pairs.visible
    return forward.get_total_flops() - unseen, backward.get_total_flops() - 2 * unseen


def _bytes(model: nn.Module, inputs: dict[str, Any], causal: bool) -> tuple[int, int]:
    """Return saved bytes, and bytes that blocks and the module send."""
    if causal:  # as ranks attend
        self_attention.register()
        model.set_attn_implementation(self_attention.NAME)  # pyright: ignore
    of_parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    sent: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    path = find_blocks(model)
    if path is None or isinstance(model, Projector):
        blocks = []
    else:
        blocks = list(block_list(model, path))
    senders = [*(blocks[:-1] if len(blocks) > 1 else []), *([] if causal else [model])]
    handles = [
        sender.register_forward_hook(lambda _, __, out: sent.append(first_tensor(out).nbytes))
        for sender in senders
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _run(model, inputs, causal)  # keep the loss alive: its graph holds the saved tensors
    for handle in handles:
        handle.remove()
    del loss
    return sum(held.values()), sum(sent)


def error(row: dict[str, Any], name: str) -> float:
    """Return the relative error of a counted figure."""
    counted_figure, figure = row["counted"][name], row["measured"][name]
    return abs(counted_figure - figure) / max(figure, 1)


def result_of(rows: list[dict[str, Any]], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest errors of rows, with the rows."""
    return {
        "messages_max_relative_error": max(
            (abs(row["planned"] - row["sent"]) / max(row["sent"], 1) for row in messages),
            default=None,
        ),
        "messages": messages,
        "parameters_max_relative_error": max(error(row, "parameters") for row in rows),
        "flops_max_relative_error": max(error(row, name) for row in rows for name in FLOPS),
        "bytes_max_relative_error": max(error(row, name) for row in rows for name in BYTES),
        "rows": rows,
    }


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0])
    options.add_argument("--only", help="only cases whose name contains this, without messages")
    arguments = options.parse_args()
    console = common.console()
    names = ("parameters", *FLOPS, *BYTES)
    table = Table("case", "size", *names)
    rows = []
    for case in cases():
        if arguments.only and arguments.only not in case.name:
            continue
        for row in rows_of(case):
            rows.append(row)
            table.add_row(case.name, str(row["size"]), *(
                f"{row['counted'][n]:,.0f} / {row['measured'][n]:,.0f} {error(row, n):.1%}"
                for n in names
            ))
    console.print(table)
    messages: list[dict[str, Any]] = []
    if not arguments.only:
        with common.local_ray(8):
            messages = list(message_rows())
    result = result_of(rows, messages)
    common.emit({"machine": common.machine(), **result}, arguments.json)


if __name__ == "__main__":
    main()
