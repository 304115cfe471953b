"""Example inputs of an encoder in a configuration, which the encoder is probed with."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from raymm.files.section import Count, Section, Tuple

if TYPE_CHECKING:
    import torch

_MOST_NUMBERS = 10**8


class ExampleSection(Section):
    """One tensor: exactly one of ``shape`` and ``values``.

    Attributes:
        shape: shape of a random tensor: normally distributed, or ones if the dtype is not
            floating-point.
        values: the values, as nested lists.
        dtype: dtype of the tensor.
    """

    shape: Tuple[Count] | None = None
    values: list[Any] | None = None
    dtype: Literal[
        "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    ] = "float32"  # fmt: skip

    @model_validator(mode="after")
    def _check_fields(self) -> ExampleSection:
        if (self.shape is None) == (self.values is None):
            raise ValueError("give exactly one of shape, values")
        if self.shape is not None and prod(self.shape) > _MOST_NUMBERS:
            raise ValueError(f"shape has more than {_MOST_NUMBERS} numbers")
        self.tensor()
        return self

    def tensor(self) -> torch.Tensor:
        """Return the tensor, which is the same every time."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.values is not None:
            try:
                return torch.tensor(self.values, dtype=dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"values are not a tensor of {self.dtype}: {error}") from None
        assert self.shape is not None  # see _check_fields
        if not dtype.is_floating_point:
            return torch.ones(self.shape, dtype=dtype)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def example_tensors(
    examples: Mapping[str, ExampleSection] | None,
) -> dict[str, torch.Tensor] | None:
    """Return the tensors by name; None if there are none."""
    if not examples:
        return None
    return {name: section.tensor() for name, section in examples.items()}
