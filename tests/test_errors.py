"""Every error that raymm defines is one of its own, and says how it ends."""

import importlib
import inspect
import pickle

from raymm import errors
from tests import house

# They leave a computation, or end a process as signals do: nothing is wrong.
NO_ERRORS = {
    "CutReached", "Interrupted", "RootReached", "RunInterruptedError", "RunTerminatedError",
    "SaveAbandoned", "TextsApart", "TooManyStages", "TooManyTransitions", "_Projected",
    "_Returned",
}


def exceptions() -> dict[str, type[BaseException]]:
    """All that the packages define, but warnings."""
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


def test_all_are_of_three_kinds():
    found = exceptions()
    assert len(found) > 40
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


def test_they_arrive_from_other_processes():
    for kind in (errors.InputError, errors.RankFailedError, errors.ClusterLostError):
        error = kind("a sentence")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
