"""Every error of raymm has a class of raymm, and documents how it ends a run."""

import ast
import importlib
import inspect
import pickle

from raymm import errors
from tests import house

# These leave a computation, or end a process as signals do: nothing is wrong.
NO_ERRORS = {"ForwardLeft"}


def exceptions() -> dict[str, type[BaseException]]:
    """Return all exceptions of the packages, except warnings."""
    found = {}
    for file in house.files():
        if file.endswith("__main__.py"):
            continue
        module = importlib.import_module(house.module_name(file))
        for name, value in vars(module).items():
            if (
                inspect.isclass(value) and issubclass(value, BaseException)
                and value.__module__ == module.__name__ and not issubclass(value, Warning)
            ):
                found[name] = value
    return found


def test_all_errors_are_of_three_kinds():
    found = exceptions()
    assert len(found) >= 15
    kinds = errors.InputError, errors.RunError, errors.InternalError
    strangers = {name for name, error in found.items() if not issubclass(error, kinds)}
    assert strangers == NO_ERRORS | {"Error"}


def test_an_error_ends_a_command_in_one_way():
    assert not [
        name for name, error in exceptions().items()
        if sum(issubclass(error, kind) for kind in (
            errors.InputError, errors.RunError, errors.InternalError,
        )) > 1
    ]


def test_errors_arrive_from_other_processes():
    for error in (
        errors.InputError("a sentence"),
        errors.RankFailedError("a sentence", errors.FailureKind.USER),
        errors.RunFailedError("a sentence", lost=errors.Loss.NODE, nodes=frozenset({"a"})),
        errors.NotRunError("a sentence", {"pixel_values": 1}),
        errors.SampleError("a reason", "images", "a.png", "s", "rows.jsonl:1"),
        errors.DataError("a sentence"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert vars(again) == vars(error)


# Handlers of any exception of a model's or a user's code.
ANYTHING = {"USER_CODE_RAISES", "_FAILURES"}


def bare_texts(source):
    """Yield lines where the text of a foreign error is the only reason of a rejection."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None or not handler.name:
            continue
        if not ANYTHING & {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}:
            continue
        for raised in ast.walk(handler):
            if not isinstance(raised, ast.Raise) or raised.exc is None:
                continue
            line = raised.lineno
            for node in ast.walk(raised.exc):
                if isinstance(node, ast.Call) and ast.unparse(node) == f"str({handler.name})":
                    yield line
                values = node.values if isinstance(node, ast.JoinedStr) else []
                for before, value in zip([None, *values], values, strict=False):
                    text = str(before.value) if isinstance(before, ast.Constant) else ""
                    is_shown = isinstance(value, ast.FormattedValue)
                    shown = ast.unparse(value.value) if is_shown else ""
                    is_reason = shown == f"brief({handler.name})" and not text.endswith("(")
                    if shown == handler.name or is_reason:
                        yield line


def test_texts_of_other_libraries_are_details_of_refusals():
    refusal = "try: run()\nexcept USER_CODE_RAISES as error: raise ProbeError({})"
    for reason in ('f"it fails: {error}"', "str(error)", 'f"it fails: {brief(error)}"'):
        assert list(bare_texts(refusal.format(reason)))
    for reason in ('f"it fails{because(error)}"', 'f"it fails ({brief(error)})"'):
        assert not list(bare_texts(refusal.format(reason)))
    rooms = "actors/probe", "raymm/model", "raymm/batch", "raymm/runtime", "raymm/layout"
    files = [file for file in house.files() if file.startswith(rooms)]
    found = {file: list(bare_texts((house.ROOT / file).read_text())) for file in files}
    assert not {file: lines for file, lines in found.items() if lines}
