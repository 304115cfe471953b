"""Cost of a layer for one process, if several processes split the tokens (``cp``) or parameters
(``tp``) of a rank, or replicas of a module (``dp``) sum gradients.

Everything is derived from the profile's numbers of whole layers. With ``n`` processes in a group
and B bytes, a ring's all-reduce sends ``2 (n-1)/n B`` per process, an all-gather ``(n-1)/n B``.
Assumptions:

- Compute is split evenly: times are divided by ``cp * tp``. Nothing is added for smaller matrix
  products, which were not measured.
- ``tp`` all-reduces the residual stream, in the compute dtype, twice per block forward and twice
  backward (Megatron-LM, Shoeybi et al. 2019, section 3), once each for a projector, without
  overlap. The stream has the size of the hidden state that a block receives.
- ``cp`` gathers keys and values (``gather`` of :mod:`raymm.scheduler.context_parallel.traffic`, an
  upper bound for the cheapest method), and sums their gradients in fp32. If a profile lacks the
  size of keys and values, they are as large as the queries.
- Activations are divided by ``cp``. ``tp`` divides only activations inside a block. The rest
  follows from a measurement with half of the parameters (``halved`` of a layer's cost) or, without
  it, is the residual stream and the results of norms: :data:`WHOLE_COPIES` times the hidden state.
- A layer that recomputes activations repeats the all-reduces and gathers of its forward.
- Parameters and their gradients are divided by ``tp``, except ``replicated_bytes``, and
  ``few_bytes``, which are divided by ``few_heads`` at most; ``cp`` does not divide them.
  ``"zero1"`` divides AdamW's moments by ``dp * cp`` as well.
- ``"fsdp"`` divides the parameters, gradients and moments of a stage by ``fsdp * cp``, and one
  layer at a time is whole (parameters outside the blocks always are; this is ignored). Each pass
  gathers parameters in the compute dtype while it computes, and a backward also reduces gradients
  in fp32; it takes as long as the longer of the two.
- With ``ep``, the experts of a layer are not gathered and their gradients not reduced. Each pass
  sends tokens to the experts and back, equally to all processes (:func:`exchange_seconds`), without
  overlap; the exchange of token counts is ignored.
- Gradients are summed over ``dp * cp`` once a step, during the backward of the stage's last
  microbatch. The part that this does not hide is added to B_w, spread evenly over the microbatches,
  so that schedules, bounds and simulations need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.recomputation import REMADE, LayerOption
from raymm.scheduler.graph.module_graph import ModuleNode
from raymm.scheduler.plan.stage import Degrees

# Fields of a layer's cost that are proportional to the number of samples.
_SECONDS = ("forward", "backward_input", "backward_weight")
_SAMPLE_BYTES = (
    "activation_bytes", "output_bytes", "key_value_bytes", "working_bytes", "forward_bytes",
    "data_bytes", "exchange_bytes",
)

# Fp32 hidden states that tensor parallelism replicates: the residual stream at both norms of a
# block in fp32, the intermediates of RMS norms, and the results of both norms in the compute dtype.
# These are 3 to 5, depending on norm and dtype.
WHOLE_COPIES = 4
_FP32_BYTES = 4


def process_layers(
    profile: CostProfile,
    node: ModuleNode,
    degrees: Degrees,
    token_link: Link | None = None,
    tensor_link: Link | None = None,
) -> tuple[LayerCost, ...]:
    """Return a module's layers for one process of a rank. Output bytes stay those of the whole
    rank, because messages between ranks do not depend on its number of processes. The links are
    those between processes that split tokens, and parameters; None if communication takes no
    time."""
    layers = profile.modules[node.name]
    if degrees == Degrees():
        return layers
    key = (node.name, degrees, token_link, tensor_link)
    if key not in profile.shared_layers:
        profile.shared_layers[key] = tuple(
            _process_layer(
                profile, layers, index, index >= node.num_blocks, degrees, token_link, tensor_link
            )
            for index in range(len(layers))
        )
    return profile.shared_layers[key]


def _process_layer(
    profile: CostProfile, layers: tuple[LayerCost, ...], index: int, projector: bool,
    degrees: Degrees, token_link: Link | None, tensor_link: Link | None,
) -> LayerCost:
    cost, cp, tp = layers[index], degrees.cp, degrees.tp
    # Number of tensor-parallel groups on the rank; each has a share of the tokens.
    shares = prod(degrees) // tp
    # The hidden state in fp32, of all tokens. The last layer's output is different (a loss).
    stream = layers[index - 1].output_bytes if index else cost.output_bytes
    in_dtype = stream * profile.element_bytes / _FP32_BYTES
    sums = (1 if projector else 2) * all_reduce_seconds(in_dtype / shares, tp, tensor_link)
    heads = min(tp, cost.few_heads or tp)
    keys = 0.0 if projector else (cost.key_value_bytes or 2 * in_dtype) * cp / (heads * shares)
    gradients = keys * (1 + _FP32_BYTES / profile.element_bytes)
    # A projector keeps its input, and its output only if the loss needs it.
    unsplit = min((1 if projector else WHOLE_COPIES) * stream, cost.activation_bytes)
    few = cost.few_bytes
    shared = cost.parameter_bytes - cost.replicated_bytes - few
    parameters = cost.replicated_bytes + -(-few // heads) + -(-shared // tp)
    # Weights under adapters are nearly all of a layer's parameters, and are sharded like the layer.
    base = cost.base_bytes and cost.base_bytes * parameters // cost.parameter_bytes
    gathered = sums + gather_seconds(keys, cp, token_link)
    # A tied embedding is replicated if it fits into the replicated bytes, where it is the largest
    # part.
    whole_tied = cost.tied_bytes <= cost.replicated_bytes
    tied = cost.tied_bytes if whole_tied else -(-cost.tied_bytes // tp)

    def held(size: int, half: int | None) -> int:
        first = min(unsplit, size) if half is None else max(0, 2 * half - size)
        return round((first + (size - first) / tp) / shares)

    halved = cost.halved
    halves = {option.name: option for option in halved.options} if halved else {}
    return LayerCost(
        forward=cost.forward / (shares * tp) + gathered,
        backward_input=cost.backward_input / (shares * tp)
        + sums + gather_seconds(gradients, cp, token_link),
        backward_weight=cost.backward_weight / (shares * tp),
        activation_bytes=held(cost.activation_bytes, halved and halved.activation_bytes),
        parameter_bytes=parameters,
        output_bytes=cost.output_bytes,
        replicated_bytes=cost.replicated_bytes,
        key_value_bytes=round(keys / cp),
        working_bytes=held(cost.working_bytes, halved and halved.working_bytes),
        forward_bytes=held(cost.forward_bytes, halved and halved.forward_bytes),
        data_bytes=cost.data_bytes,
        base_bytes=base,
        moments=cost.moments,
        in_bf16=cost.in_bf16,
        copied=cost.copied,
        quantised=cost.quantised,
        expert_bytes=min(parameters, -(-cost.expert_bytes // tp)),
        exchange_bytes=cost.exchange_bytes,
        few_bytes=-(-few // heads),
        few_heads=cost.few_heads,
        tied_bytes=tied,
        options=tuple(
            LayerOption(
                option.name,
                option.seconds / (shares * tp) + (gathered if option.name in REMADE else 0.0),
                held(option.nbytes, half and half.nbytes),
                None if option.working_bytes is None
                else held(option.working_bytes, half and half.working_bytes),
            )
            for option in cost.options for half in [halves.get(option.name)]
        ),
    )


def stage_layers(layers: Sequence[LayerCost], lo: int, hi: int) -> tuple[LayerCost, ...]:
    """Return layers [lo, hi) of a module as one stage holds them: parameters that the module's
    first and last layer share are counted only in the first."""
    chosen = tuple(layers[lo:hi])
    tied = chosen[-1].tied_bytes if len(chosen) == len(layers) > 1 else 0
    if not tied:
        return chosen
    last = chosen[-1]
    untied = replace(
        last, parameter_bytes=last.parameter_bytes - tied, tied_bytes=0,
        replicated_bytes=last.replicated_bytes - tied * (tied <= last.replicated_bytes),
        base_bytes=last.base_bytes - tied * (tied <= last.base_bytes),
    )
    return (*chosen[:-1], untied)


def all_reduce_seconds(size: float, processes: int, link: Link | None) -> float:
    """Return the seconds of a ring all-reduce of ``size`` bytes; 0 without a link."""
    return 2 * gather_seconds(size, processes, link)


def gather_seconds(size: float, processes: int, link: Link | None) -> float:
    """Return the seconds of a ring all-gather with a result of ``size`` bytes, or of such a
    reduce-scatter; 0 without a link or data."""
    if link is None or processes == 1 or not size:
        return 0.0
    return (processes - 1) * (link.latency + size / processes / link.bandwidth)


def exchange_seconds(size: float, processes: int, link: Link | None) -> float:
    """Return the seconds of two all-to-all exchanges, of tokens to experts and back, each of half
    of ``size`` bytes over all processes (including what stays local), split evenly. The result is 0
    without a link."""
    return 2 * gather_seconds(size / (2 * processes), processes, link)


def exposed_seconds(reduction: float, backward: float) -> float:
    """Return the seconds of a gradient sum that the last microbatch's backward does not hide."""
    return max(0.0, reduction - backward)


def layer_of_samples(cost: LayerCost, times: float) -> LayerCost:
    """Return the cost of a layer with ``times`` as many samples (below 1 for a share of them):
    seconds and sizes of samples scale proportionally."""
    def scaled(nbytes: int | None) -> int | None:
        return nbytes and math.ceil(nbytes * times)

    options = tuple(
        LayerOption(o.name, o.seconds * times, scaled(o.nbytes) or 0, scaled(o.working_bytes))
        for o in cost.options
    )
    numbers = {name: getattr(cost, name) * times for name in _SECONDS}
    sizes = {name: scaled(getattr(cost, name)) for name in _SAMPLE_BYTES}
    return replace(cost, **numbers, **sizes, options=options, halved=None)
