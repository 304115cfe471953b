"""The pages for users, and the blocks of code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEVELOPERS = ROOT / "docs" / "architecture.md"
PAGES = [
    ROOT / "README.md", ROOT / "deploy" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != DEVELOPERS),
]
_BLOCK = re.compile(r"(?:<!-- not (run|checked): .+? -->\n)?^```(\w*)\n(.*?)^```", re.M | re.S)


class Block(NamedTuple):
    """A block of code.

    Attributes:
        page: its file, from the root.
        line: where it begins.
        language: as the fence says; empty for commands.
        text: what is in it.
        skipped: whether a comment over it says why it is ``not run`` or ``not checked``.
    """

    page: str
    line: int
    language: str
    text: str
    skipped: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(2) if match[2] else match.start(3)) + 1
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, match[2], match[3], match[1] is not None))
    return [block for block in found if block.language in languages]
