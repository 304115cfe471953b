"""Measures of the code's size and shape: ``python -m tests.house --metrics --json``.

Every figure except those of the roads (:mod:`tests.house_roads`) is read from the syntax trees of
the four packages.
"""

from __future__ import annotations

import ast
import builtins
import functools
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.house import PACKAGES, ROOT, feature_imports, files, imports, num_lines, tree

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = FUNCTIONS | ast.ClassDef | ast.Module
# Classes that represent a user's model, and their counterparts at run time.
MODEL_CLASSES = {
    "MultimodalModule", "PretrainedVlm", "ModuleDag", "ParallelModule", "ParallelModel",
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


@functools.cache
def members() -> dict[str, list[str]]:
    """Return the counted members of each measure."""
    return {
        "isinstance_on_models": _model_checks(),
        "language_model_files": [
            file for file in files() if "LANGUAGE_MODEL" in (ROOT / file).read_text()
        ],
        "wide_functions": _wide_functions(compiled=False),
        "wide_kernels": _wide_functions(compiled=True),
        "functions_with_one_caller": _functions_with_one_caller(),
        "files_with_one_importer": _files_with_one_importer(),
        "attributes_set_from_outside": _attributes_set_from_outside(),
        "exception_classes": exception_classes(),
        "feature_imports": [
            f"{feature}: {one.source}:{one.line} {one.name}"
            for feature, found in feature_imports().items() for one in found
        ],
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


def _wide_functions(compiled: bool) -> list[str]:
    """Find functions with eight or more parameters, without ``self`` and ``cls``.

    Args:
        compiled: True for the functions that Triton or numba compiles, whose parameters are
            mostly arrays, strides and constants; False for all others. Fields of dataclasses and
            named tuples do not count.
    """
    found = []
    for file, node in _nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count >= MANY_PARAMETERS and _is_compiled(node) == compiled:
            found.append(f"{file}:{node.lineno} {node.name}")
    return found


def _is_compiled(function: FUNCTIONS) -> bool:
    """Return True if a decorator compiles a function: ``@triton.jit``, numba's, or one of the
    packages that applies numba's."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(_compiles(d) or _last_name(d) in _own_compilers() for d in decorators)


@functools.cache
def _own_compilers() -> frozenset[str]:
    """Return the names of the packages' decorators whose definition uses a compiler."""
    names = {
        node.name for _, node in _nodes(ast.FunctionDef)
        if any(_compiles(part) for line in node.body for part in ast.walk(line))
    }
    for _, node in _nodes(ast.Assign):
        if any(map(_compiles, ast.walk(node.value))):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _compiles(decorator: ast.AST) -> bool:
    return _last_name(decorator).endswith(("jit", "jitable"))


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
    """Find assignments to attributes of objects that other code owns.

    An attribute counts if a class of the packages defines it. Torch's own attributes of tensors
    and modules (``grad``, ``data``, ``training``, ``forward``) are not attributes of the packages.
    A function owns, and may write to,

    - ``self`` and ``cls``, and the variables of its file;
    - objects that it creates: every value of the name is a call of a class of the packages, or of
      its alternative constructor, or of another library (``copy.copy``);
    - objects of other libraries: parameters and casts whose type is a class of a library, and
      attributes of what a library returned;
    - the context of a ``torch.autograd.Function``, which is the first parameter of its methods.

    Functions that numba or Triton compiles write fields of arrays, which are not attributes.
    ``setattr``, and changes of a value in place (``object.rows.append``), are not found.
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
    defined -= {*dir(torch.Tensor), *dir(nn.Module), *nn.Module.__annotations__}
    classes = {node.name for _, node in _nodes(ast.ClassDef)}
    writes = [_OutsideWrites(file, defined, classes) for file in files()]
    return sorted({found for write in writes for found in write.found})


class _OutsideWrites(ast.NodeVisitor):
    """Assignments of one file to attributes of objects that a function does not own.

    Attributes:
        found: assignments, each as "file:line target".
    """

    def __init__(self, file: str, defined: set[str], classes: set[str]) -> None:
        self._file, self._defined, self._classes = file, defined, classes
        self._libraries: set[str] = set()
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Import):
                self._libraries |= {
                    name.asname or name.name.split(".")[0] for name in node.names
                    if name.name.split(".")[0] not in PACKAGES
                }
            elif isinstance(node, ast.ImportFrom) and not node.level:
                if (node.module or "").split(".")[0] not in PACKAGES:
                    self._libraries |= {name.asname or name.name for name in node.names}
        # Owned names, with True for objects of libraries.
        self._owned = dict.fromkeys(_bindings(tree(file)), False) | {"self": False, "cls": False}
        self._has_context = False
        self.found: set[str] = set()
        self.visit(tree(file))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._has_context = self._has_context, any(
            _last_name(base) == "Function" for base in node.bases
        )
        self.generic_visit(node)
        self._has_context = before

    def visit_FunctionDef(self, node: FUNCTIONS) -> None:
        if _is_compiled(node):
            return
        before, has_context = self._owned, self._has_context
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = {argument.arg for argument in arguments} - {"self", "cls"}
        self._owned = {name: own for name, own in before.items() if name not in names}
        self._owned |= {
            argument.arg: True for argument in arguments
            if self._is_library_type(argument.annotation)
        }
        if has_context and arguments:
            self._owned[arguments[0].arg] = True
        for name, values in _bindings(node).items():
            owned = [self._is_owned(value) for value in values]
            self._owned.pop(name, None)
            if None not in owned:
                self._owned[name] = all(owned)
        self._has_context = False
        self.generic_visit(node)
        self._owned, self._has_context = before, has_context

    visit_AsyncFunctionDef = visit_FunctionDef

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        self.found |= {
            f"{self._file}:{node.lineno} {ast.unparse(target)}"
            for target in _targets(node)
            if isinstance(target, ast.Attribute) and target.attr in self._defined
            and self._is_owned(target.value) is None
        }
        self.generic_visit(node)

    visit_Assign = visit_AnnAssign = visit_AugAssign = _visit_assignment

    def _is_owned(self, value: ast.expr | None) -> bool | None:
        """Return True for an object of a library, False for another owned object, else None."""
        if isinstance(value, ast.Name):
            return True if value.id in self._libraries else self._owned.get(value.id)
        if isinstance(value, ast.Attribute):
            return True if self._is_owned(value.value) else None
        if not isinstance(value, ast.Call):
            return None
        function = value.func
        if _last_name(function) == "cast":
            return True if self._is_library_type(value.args[0]) else None
        if self._is_owned(function):
            return True
        owner = function.value if isinstance(function, ast.Attribute) else function
        is_class = {_last_name(function), _last_name(owner)} & {*self._classes, "cls", "__new__"}
        return False if is_class else None

    def _is_library_type(self, annotation: ast.expr | None) -> bool:
        base = annotation
        while isinstance(base, ast.Attribute):
            base = base.value
        return isinstance(base, ast.Name) and base.id in self._libraries and base.id != "Any"


def _bindings(scope: ast.Module | FUNCTIONS) -> dict[str, list[ast.expr | None]]:
    """Return the values of each name that a scope binds, without nested scopes; None for a value
    that is part of another one."""
    found: dict[str, list[ast.expr | None]] = defaultdict(list)
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, FUNCTIONS | ast.ClassDef | ast.Lambda):
            continue
        waiting[:0] = ast.iter_child_nodes(node)  # in the order of the source
        pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.withitem):
            pairs = [(node.optional_vars, node.context_expr)]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, None)]
        for target, value in pairs:
            if isinstance(value, ast.Constant):
                continue  # None before the object exists
            if isinstance(target, ast.Name):
                found[target.id].append(value)
            elif isinstance(target, ast.Tuple):
                several = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
                for name, part in zip(target.elts, several, strict=False):
                    if isinstance(name, ast.Name):
                        found[name.id].append(part)
    return found


def _last_name(expression: ast.AST) -> str:
    return getattr(expression, "attr", getattr(expression, "id", ""))


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, with the members of tuples."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


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
