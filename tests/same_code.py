"""Compare the code of the working tree with a commit's, without docstrings and comments.

    python -m tests.same_code [--strings] [COMMIT]

Prints each changed Python file whose syntax tree differs once docstrings are removed, and exits
with code 1 if there is one. With ``--strings``, the values of string literals are not compared
either, so that the wording of error messages may change. COMMIT is ``main`` by default.
"""

import ast
import subprocess
import sys
from pathlib import Path


def skeleton(source: str, strings: bool) -> str:
    """Return a dump of a file's syntax tree without docstrings.

    Args:
        source: Python source code.
        strings: True to also replace each string literal, formatted or not, by the same constant.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]
    if strings:
        tree = _WithoutStrings().visit(tree)
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


def differences(commit: str, strings: bool) -> list[str]:
    """Return the Python files whose code differs from ``commit``, new and removed ones included."""
    names = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", "*.py"],
        check=True, capture_output=True, text=True,
    ).stdout.split()
    return [
        name for name in names
        if _version(name, commit, strings) != _version(name, None, strings)
    ]


def _version(name: str, commit: str | None, strings: bool) -> str | None:
    if commit is None:
        source = Path(name).read_text() if Path(name).is_file() else None
    else:
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], capture_output=True, text=True)
        source = shown.stdout if shown.returncode == 0 else None
    return None if source is None else skeleton(source, strings)


def main() -> int:
    arguments = sys.argv[1:]
    strings = "--strings" in arguments
    commits = [argument for argument in arguments if argument != "--strings"]
    changed = differences(commits[0] if commits else "main", strings)
    print("\n".join(f"{name}: the code differs" for name in changed) or "no code differs")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
