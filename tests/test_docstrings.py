"""Public functions with three or more parameters say in ``Args`` what each of them is.

Exempt are Triton's kernels, whose files say it once for all of them; methods without a docstring of
their own, whose base class has it; and what says that its arguments are another's ("As :meth:",
"arguments as of").
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import house

FEW = 2  # parameters that need no list
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\*{0,2}\w+(?:(?:, | to | and )\*{0,2}\w+)*):", re.MULTILINE)
_REFERS = re.compile(r"\A(?:.*\n)?As :(?:meth|func)|arguments as (?:of|in)", re.IGNORECASE)


def named(text: str) -> set[str]:
    """The names that a docstring's sections explain."""
    entries = (entry for section in _SECTION.findall(text) for entry in _ENTRY.findall(section))
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def public_functions(node: ast.AST, doc: str = "") -> Iterator[tuple[ast.FunctionDef, str, bool]]:
    """(function, its docstring, whether it is a method) of what has no underscore, the docstring
    of a constructor with its class's."""
    method = isinstance(node, ast.ClassDef)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child, ast.get_docstring(child) or "")
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield child, ast.get_docstring(child) or "", method
        elif isinstance(child, ast.FunctionDef) and child.name == "__init__":
            yield child, f"{doc}\n{ast.get_docstring(child) or ''}", method


def parameters(function: ast.FunctionDef, method: bool) -> list[str]:
    """Names of a function's parameters, but for ``self`` and ``cls``."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    if method and names and names[0] in ("self", "cls"):
        del names[0]
    names += [a.arg for a in given.kwonlyargs]
    return names + [a.arg for a in (given.vararg, given.kwarg) if a]


def unexplained(function: ast.FunctionDef, doc: str, method: bool) -> list[str]:
    """Parameters that a function's docstring should explain, and does not."""
    names = parameters(function, method)
    kernel = any("triton.jit" in ast.unparse(one) for one in function.decorator_list)
    inherited = method and not doc.strip()
    if len(names) <= FEW or kernel or inherited or _REFERS.search(doc):
        return []
    known = named(doc)
    return [name for name in names if name not in known]


@pytest.mark.parametrize("file", [f for f in house.files()])
def test_parameters_are_explained(file: str) -> None:
    wrong = [
        f"{file}:{function.lineno}: {function.name}: {', '.join(names)}"
        for function, doc, method in public_functions(house.tree(file))
        if (names := unexplained(function, doc, method))
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_not_explained_is_noticed() -> None:
    tree = ast.parse(
        'def f(a, b, *, c):\n    """Do.\n\n    Args:\n        a, b: numbers.\n    """\n'
    )
    (function, doc, method), = public_functions(tree)
    assert unexplained(function, doc, method) == ["c"]
