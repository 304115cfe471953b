"""Metrics of the similarity between a generated text and the reference answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Threshold of ANLS: a less similar text scores 0 (Biten et al., Scene Text Visual Question
# Answering, 2019, eq. 1).
LEAST_SIMILARITY = 0.5

Metric = Callable[[str, str], float]


def exact_match(text: str, answer: str) -> float:
    """Return 1 if the texts are equal except for surrounding white space, else 0."""
    return float(text.strip() == answer.strip())


def anls(text: str, answer: str) -> float:
    """Return the normalised Levenshtein similarity of characters, ignoring case and surrounding
    white space; 0 below :data:`LEAST_SIMILARITY`."""
    text, answer = text.strip().lower(), answer.strip().lower()
    longest = max(len(text), len(answer))
    similarity = 1.0 if not longest else 1 - edits(text, answer) / longest
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def word_errors(text: str, answer: str) -> tuple[int, int]:
    """Return the number of word insertions, deletions and substitutions, and the number of words in
    the answer."""
    words = answer.split()
    return edits(text.split(), words), len(words)


def edits(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the Levenshtein distance: the number of insertions, deletions and substitutions of
    elements."""
    row = list(range(len(second) + 1))
    for number, element in enumerate(first, 1):
        diagonal, row[0] = row[0], number
        for column, second_element in enumerate(second, 1):
            diagonal, row[column] = row[column], min(
                row[column] + 1, row[column - 1] + 1, diagonal + (element != second_element)
            )
    return row[-1]


def measured(name: str, function: Metric | None, pairs: Sequence[tuple[str, str]]) -> float:
    """Return a metric over (text, answer) pairs; 0 for no pairs. ``name`` is ``"exact_match"``,
    ``"anls"``, ``"wer"``, or that of a custom metric, which is ``function``."""
    if name == "wer":
        counts = [word_errors(*pair) for pair in pairs]
        return sum(errors for errors, _ in counts) / max(sum(words for _, words in counts), 1)
    function = function or {"exact_match": exact_match, "anls": anls}[name]
    return sum(float(function(*pair)) for pair in pairs) / max(len(pairs), 1)
