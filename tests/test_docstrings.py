"""Docstrings are plain English: their subject comes first and they describe what exists.

The phrase table counts a compressed way of writing that the project has left. The limits are per
1,000 words of docstrings, comments and error messages; comparable projects have 0.1 to 0.3.
"""

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests import house

PHRASES = re.compile(
    r"\btold\b|\btells?\b|\bof (one's|its|their|a user's|your) own\b|\bbeside\b|\banew\b"
    r"|\bgo(es)? on\b|\bgoing on\b|\bwent on\b|\b(nobody|somebody|whoever|whomever)\b"
    r"|(?<!there )\b(is|are) no\b|\bdealt\b|\b(shared?|sharing) (them |it |samples |tokens )?out\b"
    r"|\bhand(s|ed|ing)? (on|over|out|back)\b|\bas of\b|\bunder way\b|\basked?\b|\balike\b"
    r"|\b(of|by|to|from) (which|whom)\b|\bit is said\b|\bis said\b|\bsays so\b|\bare said\b"
    r"|\bwithin which\b"
)
OPENINGS = re.compile(r"^\s*(What|Whether|Of|How|Who|Whose|That|Those|Where)\b")
FOLDER_LIMIT = 1.0  # phrases per 1,000 words
SMALL_FOLDER = 1000  # words; one phrase is accepted in a folder that has fewer
OVERALL_LIMIT = 0.5
PAGES = [*(house.ROOT / "docs").rglob("*.md"), house.ROOT / "README.md"]
FILES = [
    *house.files(),
    *(
        str(path.relative_to(house.ROOT))
        for folder in ("examples", "deploy")
        for path in sorted((house.ROOT / folder).rglob("*.py"))
    ),
]

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\*{0,2}\w+(?:(?:, | to | and )\*{0,2}\w+)*):", re.MULTILINE)


def documented_names(text: str) -> set[str]:
    """Return the names that the sections ``Args`` and ``Attributes`` of a docstring describe."""
    entries = (entry for section in _SECTION.findall(text) for entry in _ENTRY.findall(section))
    return {
        name for entry in entries for name in re.findall(r"\w+", re.sub(r" (to|and) ", ",", entry))
    }


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of all parameters of a function."""
    spec = function.args
    listed = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {argument.arg for argument in listed if argument}


def fields(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, methods and constructor parameters."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(child.name)
            names |= parameters(child) if child.name in ("__init__", "__new__") else set()
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for leaf in (leaf for target in targets for leaf in ast.walk(target)):
                names |= {leaf.id} if isinstance(leaf, ast.Name) else set()
                names |= {leaf.attr} if isinstance(leaf, ast.Attribute) else set()
    return names


def unknown_names(tree: ast.Module) -> Iterator[tuple[int, str, set[str]]]:
    """Yield (line, definition, documented names that the definition does not have)."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    derived = {node.name for node in classes if node.bases}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name not in derived:
            known = fields(node)
        else:
            continue  # a derived class may describe what its base class defines
        unknown = documented_names(ast.get_docstring(node) or "") - known
        if unknown:
            yield node.lineno, node.name, unknown


def prose(text: str) -> Iterator[str]:
    """Yield the docstrings, the strings of ``raise`` statements and the comments of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def phrases_by_folder() -> dict[str, tuple[int, int]]:
    """Return folder -> (phrases, words)."""
    hits: collections.Counter[str] = collections.Counter()
    words: collections.Counter[str] = collections.Counter()

    def count(folder: str, text: str) -> None:
        hits[folder] += len(PHRASES.findall(text))
        words[folder] += len(text.split())

    for file in FILES:
        for text in prose((house.ROOT / file).read_text()):
            count(str(PurePosixPath(file).parent), text)
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        count(str(page.relative_to(house.ROOT).parent), text)
    return {folder: (hits[folder], words[folder]) for folder in words}


@pytest.mark.parametrize("file", FILES)
def test_described_parameters_exist(file: str) -> None:
    wrong = [
        f"{file}:{line}: {name}: {', '.join(sorted(unknown))}"
        for line, name, unknown in unknown_names(ast.parse((house.ROOT / file).read_text()))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", FILES)
def test_docstrings_open_with_their_subject(file: str) -> None:
    texts = prose((house.ROOT / file).read_text())
    wrong = [text.splitlines()[0] for text in texts if OPENINGS.match(text)]
    assert not wrong, "\n".join(wrong)


def test_prose_is_plain() -> None:
    counts = phrases_by_folder()
    wrong = [
        f"{folder}: {hits} phrases in {words} words"
        for folder, (hits, words) in sorted(counts.items())
        if hits > max(FOLDER_LIMIT * words / 1000, words < SMALL_FOLDER)
    ]
    assert not wrong, "\n".join(wrong)
    hits, words = (sum(column) for column in zip(*counts.values(), strict=True))
    assert 1000 * hits / words <= OVERALL_LIMIT


def test_an_unknown_parameter_is_found() -> None:
    tree = ast.parse('def f(a, b):\n    """Do.\n\n    Args:\n        a, c: numbers.\n    """\n')
    assert list(unknown_names(tree)) == [(1, "f", {"c"})]


def test_phrases_and_openings_are_found() -> None:
    assert PHRASES.findall("whatever goes on beside it") and not PHRASES.findall("it continues")
    assert OPENINGS.match("Whether it runs.") and not OPENINGS.match("True if it runs.")
