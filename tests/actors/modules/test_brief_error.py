"""Descriptions of errors in one line."""

from raymm.actors.modules.brief_error import because, brief
from raymm.errors import ModelError


def test_own_errors_are_complete_sentences():
    error = ModelError("r is 0;\n  accepted: 1")
    assert brief(error) == "r is 0; accepted: 1"
    assert because(error, "it does not run") == ": r is 0; accepted: 1"


def test_errors_of_libraries_are_details_with_their_class():
    assert brief(ValueError("a\nb")) == "ValueError: a b"
    assert brief(KeyError()) == "KeyError"
    assert because(ValueError("a"), "it does not run") == ": it does not run (ValueError: a)"
    assert because(ValueError("a")) == " (ValueError: a)"


def test_long_texts_of_libraries_are_shortened():
    assert brief(ValueError("x" * 400)) == f"ValueError: {'x' * 300}..."
    assert brief(ModelError("x" * 400)) == "x" * 400
