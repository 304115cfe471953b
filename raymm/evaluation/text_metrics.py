"""How near a text is to the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Of ANLS: a text that is less similar counts nothing (Biten et al., Scene Text Visual Question
# Answering, 2019, eq. 1).
LEAST_SIMILARITY = 0.5

Metric = Callable[[str, str], float]


def exact_match(text: str, answer: str) -> float:
    """1 for the same text, but for spaces around it; else 0."""
    return float(text.strip() == answer.strip())


def anls(text: str, answer: str) -> float:
    """Normalised Levenshtein similarity of characters, without regard to case and to spaces around
    them; 0 below :data:`LEAST_SIMILARITY`."""
    text, answer = text.strip().lower(), answer.strip().lower()
    longest = max(len(text), len(answer))
    similarity = 1.0 if not longest else 1 - edits(text, answer) / longest
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def word_errors(text: str, answer: str) -> tuple[int, int]:
    """Words that would have to be put in, left out or exchanged; and words of the answer."""
    words = answer.split()
    return edits(text.split(), words), len(words)


def edits(first: Sequence[object], second: Sequence[object]) -> int:
    """Levenshtein distance: how many elements have to be put in, left out or exchanged."""
    row = list(range(len(second) + 1))
    for number, element in enumerate(first, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], min(
                row[place] + 1, row[place - 1] + 1, before + (element != other)
            )
    return row[-1]


def measured(name: str, function: Metric | None, pairs: Sequence[tuple[str, str]]) -> float:
    """A metric of texts and answers; of none it is 0.

    Args:
        name: ``"exact_match"``, ``"anls"``, ``"wer"``, or another's.
        function: of another; None for these.
        pairs: texts with their answers.
    """
    if name == "wer":
        counts = [word_errors(*pair) for pair in pairs]
        return sum(errors for errors, _ in counts) / max(sum(words for _, words in counts), 1)
    function = function or {"exact_match": exact_match, "anls": anls}[name]
    return sum(float(function(*pair)) for pair in pairs) / max(len(pairs), 1)
