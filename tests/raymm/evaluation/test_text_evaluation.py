"""Metrics of texts equal their definitions."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.evaluation.text_evaluation import anls, edits, exact_match, measured, word_errors

TEXTS = st.text("ab c", max_size=7)


@functools.cache
def distance(first: str, second: str) -> int:
    """Return the minimum over all edit paths, as in the definition."""
    if not first or not second:
        return len(first) + len(second)
    return min(
        distance(first[1:], second) + 1, distance(first, second[1:]) + 1,
        distance(first[1:], second[1:]) + (first[0] != second[0]),
    )


@given(TEXTS, TEXTS)
def test_distances(first, second) -> None:
    assert edits(first, second) == distance(first, second)


@given(TEXTS, TEXTS)
def test_similarity(first, second) -> None:
    text, answer = first.strip(), second.strip()
    longest = max(len(text), len(answer), 1)
    similarity = 1 - distance(text, answer) / longest
    assert anls(first, second) == pytest.approx(similarity if similarity >= 0.5 else 0.0)
    assert (anls(first, second) == 1) >= (exact_match(first, second) == 1)


def test_numbers_of_texts() -> None:
    pairs = [("a red dog", "a blue dog"), ("yes", "yes "), ("", "two words")]
    assert [word_errors(*pair) for pair in pairs] == [(1, 3), (0, 1), (2, 2)]
    assert measured("wer", None, pairs) == 3 / 6
    assert measured("exact_match", None, pairs) == 1 / 3
    assert measured("m:f", lambda text, answer: len(text), pairs) == 4
    assert measured("anls", None, []) == 0
    assert anls("Dog", "dog") == 1
