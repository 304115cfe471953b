"""Sample sizes drawn from distributions that are hard to balance, by name and seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raymm.scheduler.minibatch.problem import SampleSizes

NAMES = ("vision", "text")
LONGEST = 8192
MOST_TILES = 40

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def _lognormal(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(1, 14, count), np.exp(random.normal(5.5, 1.0, count))


def _long_tails(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    return random.pareto(1.5, count) * 3 + 1, random.pareto(1.2, count) * 100 + 16


def _correlated(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    size = random.normal(0.0, 1.0, count)
    text = np.exp(5.5 + 0.8 * size + 0.5 * random.normal(0.0, 1.0, count))
    return np.exp(1 + 0.7 * size), text


def _text_only(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    tiles = np.where(random.random(count) < 0.3, 0, random.integers(1, 13, count))
    return tiles, np.exp(random.normal(6.0, 1.2, count))


def _documents(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw pages with questions, like DocVQA: both sizes long-tailed, half of the samples text
    only.
    """
    tiles = np.where(random.random(count) < 0.5, 0, np.exp(random.normal(1.5, 0.7, count)) + 1)
    return tiles, np.exp(random.normal(5.5, 1.0, count))


DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal": _lognormal, "long_tails": _long_tails, "correlated": _correlated,
    "text_only": _text_only, "documents": _documents,
}


def drawn_sizes(name: str, count: int, seed: int) -> SampleSizes:
    """Draw up to 40 tiles and 8,192 tokens for each of ``count`` samples.

    Args:
        name: key of :data:`DISTRIBUTIONS`.
    """
    tiles, text = DISTRIBUTIONS[name](np.random.default_rng(seed), count)
    return SampleSizes(NAMES, np.stack([
        np.clip(tiles, 0, MOST_TILES).astype(np.int64), np.clip(text, 8, LONGEST).astype(np.int64),
    ], axis=1))
