"""Commands on pages exist in raymm, make and the shell."""

import re
import shlex

import pytest

from raymm.cli.main import COMMANDS as SUBCOMMANDS
from raymm.cli.main import _parser
from raymm.files.config_file import apply_override
from tests.docs.pages import PAGES, ROOT, blocks

TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
_INLINE = re.compile(r"`((?:raymm|make) [a-z][^`]*)`")
_RAYMM = re.compile(r"(?:^|-- |-m |&& )raymm ([a-z]+\b.*)$")


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of every command in blocks and text."""
    found = []
    for block in blocks("", "sh", "bash"):
        joined = re.sub(r"\\?\n\s+", " ", block.text)  # indented lines continue a command
        found += [(block.page, line) for line in joined.splitlines() if line.strip()]
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        name = str(page.relative_to(ROOT))
        found += [(name, " ".join(match.split())) for match in _INLINE.findall(text)]
    return found


def arguments(command: str) -> list[str] | None:
    """Return a command's arguments for ``raymm``; None for other programs."""
    match = _RAYMM.search(re.sub(r"\s+(?:# |\|).*", "", command))
    if match is None:
        return None
    text = match[1]
    return shlex.split(text if text.count("'") % 2 == 0 else text.rstrip("'"))  # bash -c '...'


COMMANDS = commands()
OF_RAYMM = sorted({
    (page, shlex.join(given)) for page, command in COMMANDS
    if (given := arguments(command)) is not None
})


@pytest.mark.parametrize("page, given", OF_RAYMM)
def test_options_are_those_of_the_command_line(page, given, capsys):
    words = shlex.split(given)
    if len(words) == 1:  # `raymm train` in a sentence
        assert words[0] in SUBCOMMANDS, page
        return
    try:
        parsed = _parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"{page}: raymm {given}: {capsys.readouterr().err}")
    for override in getattr(parsed, "overrides", ()):
        apply_override({}, override)
    config = getattr(parsed, "config", None) or ""
    assert not config.startswith("examples/") or (ROOT / config).is_file(), config


def test_targets_are_those_of_the_makefile():
    named = {
        (page, word) for page, command in COMMANDS if command.startswith("make ")
        for word in [command.split()[1]]
    }
    assert len(named) > 3
    assert [entry for entry in sorted(named) if entry[1] not in TARGETS] == []


def test_commands_are_found():
    assert len(OF_RAYMM) > 20
    assert arguments("ray job submit -- python -m raymm train a.yaml  # x") == ["train", "a.yaml"]
    assert arguments("ray status") is None
