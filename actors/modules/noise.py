"""Noise that belongs to samples: the same for a sample in whatever microbatch, replica, stage or
process it is worked on, and when a forward is run again.

Diffusion and flow-matching losses add noise to each sample. What a module draws by itself follows
from the microbatch (:mod:`raymm.actors.modules.draws`), so another number of microbatches, or of
replicas that share them, would be another loss. A row of this noise follows from the run's seed,
the step, the sample's number in the step, the module and the argument instead.

Legend: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from raymm.actors.modules.draws import derive_seed
from raymm.errors import InputError
from raymm.kernels.host_copies import to_device
from raymm.scheduler.graph.sample_ranges import Range


class Noise(NamedTuple):
    """An argument that is drawn; see :func:`normal_noise` and :func:`uniform_noise`.

    Attributes:
        distribution: of every element.
        like: the argument whose shape and dtype it has; None: one number per sample.
    """

    distribution: Literal["normal", "uniform"]
    like: str | None = None


def normal_noise(like: str | None = None) -> Noise:
    """As an argument of a module of a graph: noise of mean 0 and variance 1, by samples.

    Args:
        like: the keyword of another argument (B, ...), whose shape and dtype it has (that of
            numbers that are not floating-point is torch's default); None: shape (B,).
    """
    return Noise("normal", like)


def uniform_noise(like: str | None = None) -> Noise:
    """As :func:`normal_noise`, but uniform in [0, 1): times, masks."""
    return Noise("uniform", like)


class SampleSeeds(NamedTuple):
    """What noise follows from, beside the sample's place in its batch.

    Attributes:
        seed: of the run.
        step: number of the optimizer step. Evaluation has that of step 0, so that losses can be
            compared from step to step.
        batch: number of the batch, of those whose gradients the step accumulates.
        first: number within that batch of the microbatch's first sample.
    """

    seed: int = 0
    step: int = 0
    batch: int = 0
    first: int = 0


def drawn(
    noise: Noise, arguments: Mapping[str, Any], samples: Range, seeds: SampleSeeds, *place: str
) -> torch.Tensor:
    """An argument's noise (B, ...), made on the CPU, so that devices make no difference.

    Args:
        noise: what is drawn.
        arguments: the module's other arguments.
        samples: which of the microbatch, B of them.
        seeds: of the microbatch.
        place: what else differs between draws: the module, the argument.

    Raises:
        InputError: ``like`` is no tensor.
    """
    device = next(t.device for t in arguments.values() if isinstance(t, torch.Tensor))
    shape: tuple[int, ...] = ()
    dtype = torch.get_default_dtype()
    if noise.like is not None:
        like = arguments[noise.like]
        if not isinstance(like, torch.Tensor):
            raise InputError(
                f"noise {'.'.join(place)!r} is like {noise.like!r}, a {type(like).__name__}; "
                "accepted: an argument that is a tensor"
            )
        shape = tuple(like.shape[1:])
        dtype = like.dtype if like.is_floating_point() else dtype
    if device.type == "meta":
        return torch.empty(samples.size, *shape, dtype=dtype, device=device)
    values = torch.empty(samples.size, *shape, device="cpu", dtype=torch.float32)
    generator = torch.Generator("cpu")
    seed, step, batch, first = seeds
    for row, sample in enumerate(range(first + samples.lo, first + samples.hi)):
        generator.manual_seed(derive_seed(seed, step, batch, sample, "noise", *place))
        if noise.distribution == "normal":
            values[row].normal_(generator=generator)
        else:
            values[row].uniform_(generator=generator)
    return to_device(values.to(dtype), device)
