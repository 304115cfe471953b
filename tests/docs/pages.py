"""Pages for users, and the blocks of code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEVELOPERS = ROOT / "docs" / "architecture.md"
PAGES = [
    ROOT / "README.md", ROOT / "deploy" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != DEVELOPERS),
]
_BLOCK = re.compile(
    r'(?:<!-- not (run|checked): .+? -->\n)?^```(\w*)(?: title="(.+?)")?\n(.*?)^```', re.M | re.S
)


class Block(NamedTuple):
    """Block of code.

    Attributes:
        page: its file, relative to the root.
        line: first line.
        language: language of the fence; empty for commands.
        text: content.
        title: name of the file that the block is; empty for most.
        skipped: True if a comment before it explains why it is ``not run`` or ``not checked``.
    """

    page: str
    line: int
    language: str
    text: str
    title: str
    skipped: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return all blocks of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(2) if match[2] else match.start(4)) + 1
            name, skipped = str(page.relative_to(ROOT)), match[1] is not None
            found.append(Block(name, line, match[2], match[4], match[3] or "", skipped))
    return [block for block in found if block.language in languages]
