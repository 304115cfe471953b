"""Options of the command line from the fields of a dataclass."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from raymm.cli.option_arguments import (
    add_option_arguments,
    given_options,
    options_in_errors,
    parse_counts,
    read_options,
)
from raymm.errors import ConfigError


@dataclass
class Options:
    most_ranks: int | None = field(default=None, metadata={"help": "ranks"})
    limit: float = field(default=1.0, metadata={"help": "limit"})
    tokens: dict[str, int] = field(default_factory=dict, metadata={"help": "tokens"})
    names: Sequence[str] = field(default=(), metadata={"help": "names"})
    hidden: int = 3


def parsed(*words):
    add_option_arguments(parser := argparse.ArgumentParser(), Options)
    return parser.parse_args(words)


def test_options_that_are_not_given_are_left_out():
    assert given_options(parsed(), Options) == [] and not hasattr(parsed(), "hidden")
    assert read_options(parsed(), Options, {}) == {}


def test_values_have_the_types_of_their_fields():
    args = parsed(
        "--most-ranks", "4", "--limit", "2", "--names", " a,,b ", "--tokens", "llm=7",
        "--tokens", "vision=3", "--tokens", "llm=8",
    )
    assert read_options(args, Options, {"tokens": {"llm": 1, "audio": 2}}) == {
        "most_ranks": 4, "limit": 2.0, "names": ("a", "b"),
        "tokens": {"llm": 8, "audio": 2, "vision": 3},
    }


@pytest.mark.parametrize("entry", ["", "llm", "=3", "llm=", "llm=0", "llm=-1", "llm=1.5", "llm=x"])
def test_other_counts_are_refused_with_the_option(entry):
    with pytest.raises(ConfigError) as error:
        parse_counts("--tokens", [entry])
    assert str(error.value) == f"--tokens has {entry!r}; give module=number, such as llm=4096"


def test_errors_name_the_option_instead_of_the_field():
    args = parsed("--most-ranks", "4", "--tokens", "llm=7")
    with pytest.raises(ConfigError, match="^--most-ranks is 4; accepted: 8$"):
        with options_in_errors(args, Options):
            raise ConfigError("most_ranks is 4; accepted: 8")
    with pytest.raises(ConfigError, match="^most_ranks_x is 4") as error:
        with options_in_errors(args, Options):
            raise ConfigError("most_ranks_x is 4")
    assert error.value.__notes__ == ["(with --most-ranks 4 --tokens llm=7)"]
