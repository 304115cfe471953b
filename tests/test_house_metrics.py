"""Measures of the code equal slower computations."""

import importlib
import inspect

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
