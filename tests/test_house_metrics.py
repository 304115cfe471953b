"""Measures of the code equal slower computations."""

import ast
import importlib
import inspect

import pytest

from tests import house, house_metrics


def _classes() -> dict[str, type]:
    """Return all classes that the packages define, by module and name."""
    found: dict[str, type] = {}
    for file in house.files():
        if file.endswith("__main__.py"):
            continue
        module = importlib.import_module(house.module_name(file))
        found |= {
            f"{module.__name__}.{name}": value for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        }
    return found


def test_exception_classes_are_those_that_python_finds() -> None:
    expected = {
        name.rpartition(".")[2] for name, value in _classes().items()
        if issubclass(value, BaseException)
    }
    assert {found.split(" ")[1] for found in house_metrics.exception_classes()} == expected


def test_lines_of_packages_add_up() -> None:
    measures = house_metrics.metrics()
    assert measures["product_lines"] == sum(map(house.num_lines, house.files()))
    for lines in (measures, *measures["packages"].values()):
        assert 0 < lines["docstring_lines"] < lines["code_lines"] < lines["product_lines"]
        assert lines["code_lines"] + lines["docstring_lines"] <= lines["product_lines"]


def test_wide_functions_are_those_with_eight_parameters() -> None:
    signatures = {
        f"{value.__qualname__}.{name}": len(inspect.signature(function).parameters) - 1
        for value in _classes().values()
        for name, function in vars(value).items()
        if name == "__init__" and inspect.isfunction(function)
        and "<" not in function.__qualname__ and "__create_fn__" not in function.__qualname__
        and not hasattr(value, "__dataclass_fields__")
    }
    wide = [name for name, count in signatures.items() if count >= house_metrics.MANY_PARAMETERS]
    found = house_metrics.members()["wide_functions"]
    assert sum(name.endswith(" __init__") for name in found) == len(wide)


def test_functions_compiled_by_numba_are_kernels() -> None:
    from numba.core.dispatcher import Dispatcher

    compiled = {
        value.py_func
        for file in house.files() if file.startswith("scheduler/")
        for value in vars(importlib.import_module(house.module_name(file))).values()
        if isinstance(value, Dispatcher)
    }
    wide = {
        function.__name__ for function in compiled
        if len(inspect.signature(function).parameters) >= house_metrics.MANY_PARAMETERS
    }
    found = house_metrics.members()
    assert wide and wide <= {kernel.split(" ")[1] for kernel in found["wide_kernels"]}
    assert not set(found["wide_kernels"]) & set(found["wide_functions"])


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ("def f(other): other.state = 1", 1),
        ("def f(other: Owner): other.part.state, x = 1, 2", 1),
        ("def f(others):\n  for one in others: one.state += 1", 1),
        ("def f(other): made = Owner(); made = other; made.state = 1", 1),
        ("def f(other):\n  def g(): other.state = 1", 1),
        ("def f(other): other.grad = other.unknown = None", 0),
        ("def f(): made = Owner(); made.state = 1", 0),
        ("import lib\ndef f(other: lib.Class): other.state = 1", 0),
        ("import lib\ndef f(): made = lib.call(); made.part.state = 1", 0),
        ("from typing import Any\ndef f(other: Any): other.state = 1", 1),
        ("known = lib()\ndef f(): known.state = 1", 0),
        ("class A(Function):\n  @staticmethod\n  def forward(ctx): ctx.state = 1", 0),
        ("class A:\n  def forward(ctx): ctx.state = 1", 1),
        ("@njit(cache=True)\ndef f(row): row.state = 1", 0),
    ],
)
def test_writes_to_objects_of_others_are_found(lines, count, monkeypatch) -> None:
    monkeypatch.setattr(house_metrics, "tree", lambda file: ast.parse(lines))
    writes = house_metrics._OutsideWrites("file.py", {"state"}, {"Owner"})
    assert len(writes.found) == count
