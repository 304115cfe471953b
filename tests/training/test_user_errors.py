"""Which errors end in a sentence and exit code 2: every class of raymm's is one or the other."""

import ast
from pathlib import Path

from raymm.cli.user_errors import USER_ERRORS

ROOT = Path(__file__).resolve().parents[2]
# Not for a user to set right: a run that failed, a defect, or caught and told by another.
OTHERS = {
    "AbsentError", "ChannelError", "CommunicationError", "ComputedTensorError", "CrossingError",
    "CutReached", "DriverError", "ExampleError", "Interrupted", "ModuleError", "ModuleTimeoutError",
    "NoBlockCalledError", "NoRoomError", "NotFiniteError", "OversubscribedError", "OwnerLostError",
    "ProgramError", "RankFailedError", "RowError", "RunFailedError", "RunFileError", "ShardError",
    "TooManyStages", "TooManyTransitions",
    "UndeclaredRandomnessError", "WeightsError", "_Projected",
}


def error_classes() -> dict[str, list[str]]:
    """Names of the classes that are errors, by their bases' names, with these."""
    found: dict[str, list[str]] = {}
    for folder in ("raymm", "actors", "scheduler", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = [getattr(base, "id", "") for base in node.bases]
    return {
        name: bases for name, bases in found.items()
        if any(base.endswith(("Error", "Exception")) for base in bases)
    }


def test_every_error_is_of_the_user_or_not():
    users = {error.__name__ for error in USER_ERRORS}
    undecided = [
        name for name, bases in error_classes().items()
        if len({name, *bases} & users) + len({name, *bases} & OTHERS) == 0
    ]
    assert undecided == []
    assert not users & OTHERS
