"""Random noise per sample, independent of layout and recomputation.

Diffusion and flow-matching losses add noise to each sample. Ordinary draws change with the number
of microbatches and replicas (:mod:`raymm.actors.modules.draws`). This noise depends on the run's
seed, the step, the sample's number in the step, the module and the argument instead.

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
    """Random argument of a module; see :func:`normal_noise` and :func:`uniform_noise`. ``like`` is
    the argument whose shape and dtype it has; None for one number per sample."""

    distribution: Literal["normal", "uniform"]
    like: str | None = None


def normal_noise(like: str | None = None) -> Noise:
    """Declare an argument of a graph module as noise with mean 0 and variance 1 per sample.

    Args:
        like: keyword of another argument (B, ...) whose shape and dtype the noise has (torch's
            default dtype, if that is not floating-point); None for shape (B,).
    """
    return Noise("normal", like)


def uniform_noise(like: str | None = None) -> Noise:
    """Declare an argument as uniform noise in [0, 1), such as times or masks; see
    :func:`normal_noise`."""
    return Noise("uniform", like)


class SampleSeeds(NamedTuple):
    """Origin of a sample's noise, in addition to its position in the batch. Evaluation uses step 0,
    so that losses are comparable over steps. ``batch`` is the number among those whose gradients
    the step accumulates, and ``first`` the number of the microbatch's first sample in it."""

    seed: int = 0
    step: int = 0
    batch: int = 0
    first: int = 0


def drawn(
    noise: Noise, arguments: Mapping[str, Any], samples: Range, seeds: SampleSeeds, *place: str
) -> torch.Tensor:
    """Return an argument's noise (B, ...) for B samples, drawn on the CPU for all devices.
    ``place``, the module and the argument, is part of the seed. Raise an ``InputError`` if ``like``
    is not a tensor among the other arguments."""
    device = next(t.device for t in arguments.values() if isinstance(t, torch.Tensor))
    shape: tuple[int, ...] = ()
    dtype = torch.get_default_dtype()
    if noise.like is not None:
        source = arguments[noise.like]
        if not isinstance(source, torch.Tensor):
            raise InputError(
                f"noise {'.'.join(place)!r} is like {noise.like!r}, a {type(source).__name__}; "
                "accepted: an argument that is a tensor"
            )
        shape = tuple(source.shape[1:])
        dtype = source.dtype if source.is_floating_point() else dtype
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
