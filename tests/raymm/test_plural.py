"""Numbers of things in texts."""

from __future__ import annotations

import pytest

from raymm.plural import plural


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (48_000, "48,000 ranks"),
])
def test_a_noun_has_the_form_of_its_number(count, text):
    assert plural(count, "rank") == text


def test_the_ending_of_the_plural_can_be_given():
    assert [plural(n, "process", "es") for n in (1, 2)] == ["1 process", "2 processes"]
