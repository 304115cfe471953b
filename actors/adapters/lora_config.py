"""Configuration of adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raymm.errors import ModelError

ALL_LINEAR = "all-linear"
BASES = ("int8", "int4")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a module's linear layers; the rest of the module is frozen.

    Attributes:
        r: rank.
        alpha: scales an adapter's output by ``alpha / r``, or by ``alpha / sqrt(r)`` with
            ``use_rslora``.
        dropout: probability of dropping an element of an adapter's input in training.
        targets: ``"all-linear"`` for all linear layers except a language model's head; another
            string is a regular expression that matches full names; a tuple has names, or endings of
            names after a dot, such as ``q_proj`` (``target_modules`` of ``peft``).
        dora: True to also train the norms of the weights' rows (DoRA).
        use_rslora: True to scale by ``alpha / sqrt(r)``, so that higher ranks do not learn more
            slowly (rank-stabilised LoRA, Kalajdzievski 2023; ``use_rslora`` of ``peft``).
        base: storage of the weights under adapters: None for no change; ``"int8"`` for a byte per
            element with a scale per output; ``"int4"`` for half a byte with a scale per output and
            32 inputs (:mod:`raymm.actors.adapters.quantised`).

    Raises:
        ModelError: an invalid field; names it.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    dora: bool = False
    use_rslora: bool = False
    base: str | None = None

    def __post_init__(self) -> None:
        if type(self.r) is not int or self.r < 1:
            raise ModelError(f"r is {self.r!r}; accepted: a whole number from 1")
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < float("inf"):
            raise ModelError(f"alpha is {self.alpha!r}; accepted: a number above 0")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ModelError(f"dropout is {self.dropout!r}; accepted: a number from 0 to below 1")
        if not self.targets or not isinstance(self.targets, str | tuple):
            raise ModelError(
                f"targets is {self.targets!r}; accepted: {ALL_LINEAR!r}, a regular expression "
                "that matches full layer names, or a tuple of names or name endings"
            )
        if not isinstance(self.use_rslora, bool):
            raise ModelError(
                f"use_rslora is {self.use_rslora!r}; accepted: true (alpha / sqrt(r)) or false"
            )
        if self.base is not None and self.base not in BASES:
            raise ModelError(f"base is {self.base!r}; accepted: {', '.join(BASES)}, or none")

    @property
    def scaling(self) -> float:
        """Return the factor of an adapter's output: ``alpha / r``, or ``alpha / sqrt(r)``."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
