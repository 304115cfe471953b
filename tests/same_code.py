"""Compare the code of the working tree with a commit's, without docstrings and comments.

    python -m tests.same_code [--strings] [--locals] [COMMIT]

Prints each changed Python file whose syntax tree differs once docstrings are removed, and exits
with code 1 if there is one. With ``--strings``, the values of string literals are not compared
either, so that the wording of error messages may change. With ``--locals``, functions may give
their local variables other names. COMMIT is ``main`` by default.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def skeleton(source: str, strings: bool = False, local_names: bool = False) -> str:
    """Return a dump of a file's syntax tree without docstrings.

    Args:
        source: Python source code.
        strings: True to also replace each string literal, formatted or not, by the same constant.
        local_names: True to also number the local variables of each outermost function in the
            order in which they appear, so that functions that differ only in their names are equal.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]
    if strings:
        tree = _WithoutStrings().visit(tree)
    if local_names:
        for function in _outermost_functions(tree):
            _number_locals(function)
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class _WithoutStrings(ast.NodeTransformer):
    """Replaces string literals; the expressions inside formatted strings stay, in sorted order."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = {
            ast.dump(self.visit(part.value)) for part in node.values
            if isinstance(part, ast.FormattedValue)
        }
        return ast.Tuple([ast.Constant(text) for text in sorted(values)], ast.Load())


def _outermost_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        else:
            yield from _outermost_functions(child)


def _number_locals(function: ast.AST) -> None:
    """Replace the names of local variables by numbers; parameters and globals keep their names.

    Nested functions and comprehensions share the numbers of the outermost function: a name must
    then change in all of them.
    """
    nodes = [node for node in ast.walk(function) if node is not function]
    fixed = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    fixed |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    fixed |= {node.name for node in nodes if isinstance(node, FUNCTIONS | ast.ClassDef)}
    names = {
        node.id for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {
        node.name for node in nodes
        if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name
    }
    numbers: dict[str, str] = {}
    for node in nodes_in_order(function):
        for field in ("id", "name"):
            name = getattr(node, field, None)
            if name in names - fixed and not isinstance(node, ast.alias):
                setattr(node, field, numbers.setdefault(name, f"local {len(numbers)}"))
        if isinstance(node, ast.Nonlocal):
            node.names = [numbers.get(name, name) for name in node.names]


def nodes_in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_in_order(child)


def differences(commit: str, strings: bool, local_names: bool) -> list[str]:
    """Return the Python files whose code differs from ``commit``, new and removed ones included."""
    names = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", "*.py"],
        check=True, capture_output=True, text=True,
    ).stdout.split()

    def version(name: str, of_commit: bool) -> str | None:
        if of_commit:
            shown = subprocess.run(
                ["git", "show", f"{commit}:{name}"], capture_output=True, text=True
            )
            source = shown.stdout if shown.returncode == 0 else None
        else:
            source = Path(name).read_text() if Path(name).is_file() else None
        return None if source is None else skeleton(source, strings, local_names)

    return [name for name in names if version(name, True) != version(name, False)]


def main() -> int:
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    commits = [argument for argument in sys.argv[1:] if argument not in options]
    changed = differences(
        commits[0] if commits else "main", "--strings" in options, "--locals" in options
    )
    print("\n".join(f"{name}: the code differs" for name in changed) or "no code differs")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
