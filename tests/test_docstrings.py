"""Docstrings describe only parameters and fields that exist."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import house

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
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
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


@pytest.mark.parametrize("file", [f for f in house.files()])
def test_described_parameters_exist(file: str) -> None:
    wrong = [
        f"{file}:{line}: {name}: {', '.join(sorted(unknown))}"
        for line, name, unknown in unknown_names(house.tree(file))
    ]
    assert not wrong, "\n".join(wrong)


def test_an_unknown_parameter_is_found() -> None:
    tree = ast.parse('def f(a, b):\n    """Do.\n\n    Args:\n        a, c: numbers.\n    """\n')
    assert list(unknown_names(tree)) == [(1, "f", {"c"})]
