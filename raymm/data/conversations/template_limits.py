"""Limit on the work of a chat template, which is a program in the folder of a model.

transformers compiles templates in a Jinja environment without limits, where two nested loops over
``range(100000)`` take hours. The environment of this module counts every pass through the body of a
loop or macro, and every item that the condition of a loop tests. Counts do not depend on the
machine, so a sample that is refused is refused everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

from raymm.errors import SampleError

# Passes through loops per rendering. A thousand messages of a hundred parts need a tenth of them.
MOST_PASSES = 1_000_000
_passes_left: ContextVar[list[int] | None] = ContextVar("passes_left", default=None)


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Limit the renderings in a ``with`` block to :data:`MOST_PASSES` passes in total."""
    _install()
    token = _passes_left.set([MOST_PASSES])
    try:
        yield
    finally:
        _passes_left.reset(token)


def _take_pass() -> str:
    passes_left = _passes_left.get()
    if passes_left is not None:
        passes_left[0] -= 1
        if passes_left[0] < 0:
            raise SampleError(
                f"the chat template goes through its loops more than {MOST_PASSES:,} times for one "
                "sample"
            )
    return ""


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take_pass()
        yield item


@cache
def _install() -> None:
    """Make transformers compile templates in the limited environment, in this process.

    The replaced name is private to transformers;
    ``tests/data/conversations/test_template_limits.py`` fails when it changes.
    """
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    def call(name: str, *arguments: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)

    class LimitedEnvironment(ImmutableSandboxedEnvironment):
        """Environment whose loops and macros count their passes."""

        take_pass = staticmethod(_take_pass)
        counted = staticmethod(_counted)

        def _parse(self, *arguments: Any) -> nodes.Template:
            template = super()._parse(*arguments)
            for node in [*template.find_all((nodes.For, nodes.Macro))]:
                count = nodes.ExprStmt(call("take_pass"))
                node.body.insert(0, count.set_lineno(node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    items = cast(nodes.Expr, node.iter)
                    node.iter = call("counted", items).set_lineno(node.lineno)
            template.set_environment(self)
            return template

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", LimitedEnvironment)  # noqa: B010
    chat_template_utils._compile_jinja_template.cache_clear()
