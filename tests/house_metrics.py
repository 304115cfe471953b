"""Measures of the code's size and shape: ``python -m tests.house --metrics --json``.

Every figure except those of the roads (:mod:`tests.house_roads`) is read from the syntax trees of
the four packages.
"""

from __future__ import annotations

import ast
import builtins
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.house import PACKAGES, ROOT, files, imports, num_lines, tree

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = FUNCTIONS | ast.ClassDef | ast.Module
# Classes that represent a user's model, and their counterparts at run time.
MODEL_CLASSES = {
    "MultimodalModule", "WholeModel", "ModuleDag", "MultimodalParallelModule",
    "ParallelModule", "ParallelWholeModel", "ParallelDag",
}
MANY_PARAMETERS = 8
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}


def metrics() -> dict[str, Any]:
    """Return all measures of the syntax trees.

    Returns:
        Measures by name. ``packages`` has the lines of each package; measures with members are
        numbers here and lists in :func:`members`.
    """
    packages: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for file in files():
        packages[file.split("/")[0]].update(_lines(file))
    total = sum(packages.values(), Counter[str]())
    mirrored, unmirrored = _mirrored()
    return {
        **total,
        "packages": {package: dict(lines) for package, lines in packages.items()},
        **{name: len(found) for name, found in members().items()},
        "private_functions": sum(1 for _ in _private_functions()),
        "mirrored_tests": round(mirrored / (mirrored + unmirrored), 4),
    }


def members() -> dict[str, list[str]]:
    """Return the counted members of each measure."""
    return {
        "isinstance_on_models": _model_checks(),
        "language_model_files": [
            file for file in files() if "LANGUAGE_MODEL" in (ROOT / file).read_text()
        ],
        "wide_functions": _wide_functions(),
        "functions_with_one_caller": _functions_with_one_caller(),
        "files_with_one_importer": _files_with_one_importer(),
        "attributes_set_from_outside": _attributes_set_from_outside(),
        "exception_classes": exception_classes(),
    }


def _lines(file: str) -> dict[str, int]:
    """Count a file's lines: all, those with code, and those of docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    with tokenize.open(ROOT / file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type not in NOT_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
    return {
        "product_lines": num_lines(file),
        "code_lines": len(code - docstrings),
        "docstring_lines": len(docstrings),
    }


def _nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yield (file, node) for all nodes of these kinds."""
    for file in files():
        for node in ast.walk(tree(file)):
            if isinstance(node, kinds):
                yield file, node


def _model_checks() -> list[str]:
    """Find ``isinstance`` on a model's class outside ``raymm/model/``."""
    return [
        f"{file}:{node.lineno}"
        for file, node in _nodes(ast.Call)
        if getattr(node.func, "id", "") == "isinstance" and not file.startswith("raymm/model/")
        and any(
            getattr(name, "id", getattr(name, "attr", "")) in MODEL_CLASSES
            for name in ast.walk(node.args[1])
        )
    ]


def _wide_functions() -> list[str]:
    """Find functions with eight or more parameters, without ``self`` and ``cls``."""
    found = []
    for file, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) >= MANY_PARAMETERS:
            found.append(f"{file}:{node.lineno} {node.name}")
    return found


def _private_functions() -> Iterator[tuple[str, str]]:
    """Yield (file, name) of functions and methods whose name has one leading underscore."""
    for file, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if node.name.startswith("_") and not node.name.startswith("__"):
            yield file, node.name


def _functions_with_one_caller() -> list[str]:
    """Find private functions that their file names once outside their definition."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for file, node in _nodes(ast.Name, ast.Attribute):
        if isinstance(node.ctx, ast.Load):
            used[file][node.id if isinstance(node, ast.Name) else node.attr] += 1
    return [f"{file} {name}" for file, name in _private_functions() if used[file][name] == 1]


def _files_with_one_importer() -> list[str]:
    """Find files that exactly one other file of the packages imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for imported in imports():
        importers[imported.target].add(imported.source)
    return sorted(
        file for file, sources in importers.items()
        if len(sources) == 1 and not file.endswith("__init__.py")
    )


def _attributes_set_from_outside() -> list[str]:
    """Find assignments to an attribute of an object that is neither ``self`` nor created there.

    Only attributes that a class of the packages defines count: torch's modules and transformers'
    configurations are excluded.
    """
    defined = {
        target.attr
        for _, node in _nodes(ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
    } | {
        statement.target.id
        for _, node in _nodes(ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    found: set[str] = set()
    for file, function in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        made = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets if isinstance(target, ast.Name)
        }
        found.update(
            f"{file}:{node.lineno} {ast.unparse(target)}"
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
            for target in _targets(node)
            if isinstance(target, ast.Attribute) and target.attr in defined
            and _root(target) not in {"self", "cls", *made}
        )
    return sorted(found)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, with the members of tuples."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _root(target: ast.Attribute) -> str:
    """Return the name of the object that has the attribute, or its expression."""
    return target.value.id if isinstance(target.value, ast.Name) else ast.unparse(target.value)


def exception_classes() -> list[str]:
    """Return the classes of the packages that derive from an exception, each as file:line name."""
    classes = [
        (f"{file}:{node.lineno} {node.name}", node.name, {
            getattr(base, "id", getattr(base, "attr", "")) for base in node.bases
        })
        for file, node in _nodes(ast.ClassDef)
    ]
    exceptions = {
        name for name, known in vars(builtins).items()
        if isinstance(known, type) and issubclass(known, BaseException)
    }
    size = 0
    while size < len(exceptions):  # repeat until no further class is added
        size = len(exceptions)
        exceptions |= {name for _, name, bases in classes if bases & exceptions}
    return sorted(where for where, _, bases in classes if bases & exceptions)


def _mirrored() -> tuple[int, int]:
    """Count product files with and without a test under the mirrored path."""
    tests = [
        (ROOT / "tests" / file).with_name(f"test_{file.rpartition('/')[2]}")
        for file in files() if not file.endswith("__init__.py")
    ]
    present = sum(test.exists() for test in tests)
    return present, len(tests) - present
