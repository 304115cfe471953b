"""The comparison of code detects every change except prose and local names."""

import pytest

from tests.same_code import skeleton

BASE = '''
def f(a, rest):
    """Add."""
    own = a + 1  # why
    for part in rest:
        own += g(part)
    return own
'''


def same(old: str, new: str, **options: bool) -> bool:
    return skeleton(old, **options) == skeleton(new, **options)


def test_docstrings_and_comments_are_not_compared():
    assert same(BASE, BASE.replace("Add.", "Return a sum.").replace("# why", ""))


def test_local_variables_may_have_other_names():
    renamed = BASE.replace("own", "total").replace("part", "term")
    assert same(BASE, renamed, local_names=True) and not same(BASE, renamed)


@pytest.mark.parametrize(("old", "new"), [
    ("own", "part"),  # two variables become one
    ("own", "rest"),  # a variable becomes a parameter
    ("own", "g"),  # a variable hides a function
    ("rest", "others"),  # a parameter
    ("a + 1", "a + 2"),
    ("g(part)", "h(part)"),
    ("return own", "return part"),
])
def test_other_changes_are_seen(old, new):
    assert not same(BASE, BASE.replace(old, new), local_names=True)


def test_strings_are_compared_unless_excluded():
    old, new = 'raise E(f"what is {a}")', 'raise E(f"a is {a!s}; accepted: 1")'
    assert not same(old, new)
    assert same(old, new.replace("!s", ""), strings=True)
    assert not same(old, 'raise E("a is wrong")', strings=True)
