"""What a layer costs one process, where several share the tokens (``cp``) or parameters (``tp``)
of a rank, or replicas of a module (``dp``) sum gradients.

Everything follows from the profile's numbers of whole layers; with ``n`` processes in a group
and B bytes, a ring's all-reduce sends ``2 (n-1)/n B`` per process, a gather ``(n-1)/n B``.
Assumed:

- Compute is shared out evenly: times are divided by ``cp * tp``. Nothing is taken off for smaller
  matrix products, for which there is no measurement.
- ``tp`` sums the residual stream, in the compute dtype, twice per block forward and twice backward
  (Megatron-LM, Shoeybi et al. 2019, section 3), once each for a projector; nothing else is
  computed meanwhile. The stream is as large as the hidden state that a block receives.
- ``cp`` gathers keys and values (``gather`` of :mod:`raymm.scheduler.context_parallel.traffic`, an
upper
  bound of what the cheapest method sends), and sums their gradients in fp32. What a profile does
  not know of keys and values is as much as queries have.
- Activations are divided by ``cp``. By ``tp`` only what lies within a block is. What is not follows
  from what was measured of a process that has half of the parameters (``halved`` of a layer's
  cost); where that was not measured it is the residual stream and what norms make of it,
  :data:`WHOLE_COPIES` times the hidden state.
- A layer that makes activations again sums and gathers again what its forward did.
- Parameters, and their gradients, are divided by ``tp``, but for a layer's ``replicated_bytes``,
  and its ``few_bytes``, which are divided by ``few_heads`` at most; by ``cp`` not. With
  ``"zero1"``, AdamW's moments are divided by ``dp * cp`` as well.
- With ``"fsdp"`` the parameters, gradients and moments of a stage are divided by ``fsdp * cp``, and
  one layer at a time is whole (what is outside the blocks always is, which is left out). Each
  pass gathers parameters in the compute dtype while it computes, a backward also reduces gradients
  in fp32; it takes as long as the longer of the two.
- With ``ep``, a layer's experts are neither gathered nor their gradients reduced. Each pass sends
  tokens to them and back, to all processes alike (:func:`exchange_seconds`), and nothing is
  computed meanwhile; what says how many come is left out.
- Gradients are summed over ``dp * cp`` once a step, while the backward of the stage's last
  microbatch runs. What is not hidden by that is charged to B_w, spread evenly over the
  microbatches, so that schedules, bounds and simulations need not know of it.
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

# Fields of a layer's cost that grow with the samples.
_SECONDS = ("forward", "backward_input", "backward_weight")
_SAMPLE_BYTES = (
    "activation_bytes", "output_bytes", "key_value_bytes", "working_bytes", "forward_bytes",
    "data_bytes", "exchange_bytes",
)

# The residual stream at both norms of a block in fp32, what an RMS norm keeps beside it, and the
# two norms' results in the compute dtype: 3 to 5 hidden states in fp32, by kind of norm and dtype.
WHOLE_COPIES = 4
_FP32_BYTES = 4


def process_layers(
    profile: CostProfile,
    node: ModuleNode,
    degrees: Degrees,
    token_link: Link | None = None,
    tensor_link: Link | None = None,
) -> tuple[LayerCost, ...]:
    """A module's layers as one of a rank's processes has them.

    Output bytes stay those of the whole rank: what travels between ranks does not depend on how
    many processes they are.

    Args:
        profile: costs of whole layers.
        node: the module.
        degrees: how its ranks are several processes.
        token_link, tensor_link: what the processes of a rank talk over, those that share tokens
            and those that share parameters; where None, that takes no time.
    """
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
    # Groups by parameters among the processes: each has its share of the tokens.
    shares = prod(degrees) // tp
    # The hidden state in fp32, of all tokens. A last layer hands on something else: a loss.
    stream = layers[index - 1].output_bytes if index else cost.output_bytes
    in_dtype = stream * profile.element_bytes / _FP32_BYTES
    sums = (1 if projector else 2) * all_reduce_seconds(in_dtype / shares, tp, tensor_link)
    heads = min(tp, cost.few_heads or tp)
    keys = 0.0 if projector else (cost.key_value_bytes or 2 * in_dtype) * cp / (heads * shares)
    gradients = keys * (1 + _FP32_BYTES / profile.element_bytes)
    # A projector keeps its input, and its output only if the loss needs it.
    whole = min((1 if projector else WHOLE_COPIES) * stream, cost.activation_bytes)
    few = cost.few_bytes
    shared = cost.parameter_bytes - cost.replicated_bytes - few
    parameters = cost.replicated_bytes + -(-few // heads) + -(-shared // tp)
    # Weights under adapters are nearly all of a layer, and shared out as it is.
    base = cost.base_bytes and cost.base_bytes * parameters // cost.parameter_bytes
    gathered = sums + gather_seconds(keys, cp, token_link)
    # An embedding is larger than all else that tensor parallelism replicates in a layer.
    whole_tied = cost.tied_bytes <= cost.replicated_bytes
    tied = cost.tied_bytes if whole_tied else -(-cost.tied_bytes // tp)

    def held(size: int, half: int | None) -> int:
        first = min(whole, size) if half is None else max(0, 2 * half - size)
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
    """Return layers [lo, hi) of a module as one stage holds them: parameters that its first and its
    last layer share are counted with the first.

    Args:
        layers: all layers of the module.
        lo, hi: the stage's.
    """
    chosen = tuple(layers[lo:hi])
    tied = chosen[-1].tied_bytes if len(chosen) == len(layers) > 1 else 0
    if not tied:
        return chosen
    last = chosen[-1]
    alone = replace(
        last, parameter_bytes=last.parameter_bytes - tied, tied_bytes=0,
        replicated_bytes=last.replicated_bytes - tied * (tied <= last.replicated_bytes),
        base_bytes=last.base_bytes - tied * (tied <= last.base_bytes),
    )
    return (*chosen[:-1], alone)


def all_reduce_seconds(size: float, processes: int, link: Link | None) -> float:
    """A ring's all-reduce of ``size`` bytes.

    Args:
        size: bytes.
        processes: of the ring.
        link: between them; None where nothing is sent.
    """
    return 2 * gather_seconds(size, processes, link)


def gather_seconds(size: float, processes: int, link: Link | None) -> float:
    """A ring's all-gather of what has ``size`` bytes once it is together; a reduce-scatter
    takes the same. What is empty is not sent.

    Args:
        size: bytes.
        processes: of the ring.
        link: between them; None where nothing is sent.
    """
    if link is None or processes == 1 or not size:
        return 0.0
    return (processes - 1) * (link.latency + size / processes / link.bandwidth)


def exchange_seconds(size: float, processes: int, link: Link | None) -> float:
    """Two exchanges, of tokens to experts and back, each of half of ``size`` bytes: every process
    has an equal share, and sends an equal part of that to each.

    Args:
        size: bytes of all processes, with what stays where it is.
        processes: that exchange them.
        link: between them; None where nothing is sent.
    """
    return 2 * gather_seconds(size / (2 * processes), processes, link)


def exposed_seconds(reduction: float, backward: float) -> float:
    """Seconds of a sum of gradients that the last microbatch's backward does not hide."""
    return max(0.0, reduction - backward)


def layer_of_samples(cost: LayerCost, times: float) -> LayerCost:
    """A layer with so many times the samples, used without loss: seconds, and bytes of samples.

    Args:
        cost: the layer's.
        times: below one for a share of the samples.
    """
    def scaled(nbytes: int | None) -> int | None:
        return nbytes and math.ceil(nbytes * times)

    options = tuple(
        LayerOption(o.name, o.seconds * times, scaled(o.nbytes) or 0, scaled(o.working_bytes))
        for o in cost.options
    )
    numbers = {name: getattr(cost, name) * times for name in _SECONDS}
    sizes = {name: scaled(getattr(cost, name)) for name in _SAMPLE_BYTES}
    return replace(cost, **numbers, **sizes, options=options, halved=None)
